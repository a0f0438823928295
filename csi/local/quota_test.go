package local

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/csi/privatemounts"
)

// needsQuotas is set if the kernel has project quotas, so that tests which need them are not
// skipped.
const needsQuotas = "KEELSON_NEEDS_QUOTAS"

// asPod is set in a process that writes like a program in a pod: NAME SIZE, without
// CAP_SYS_RESOURCE.
const asPod = "KEELSON_TEST_AS_POD"

// diskSize is the minimum size for mkfs.xfs.
const diskSize = 320 * mib

// quotaDisk mounts a new file system with an option in a folder of its own.
func quotaDisk(t *testing.T, kind, option string) (at string) {
	t.Helper()
	privatemounts.SkipUnlessPrivate(t)
	image := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(image)
	must(t, err)
	must(t, errors.Join(f.Truncate(diskSize), f.Close()))
	mkfs := []string{"mkfs.ext4", "-q", "-F", "-O", "quota,project", image}
	if kind == "xfs" {
		mkfs = []string{"mkfs.xfs", "-q", "-f", image}
	}
	if out, err := exec.Command(mkfs[0], mkfs[1:]...).CombinedOutput(); err != nil {
		if os.Getenv(needsQuotas) == "" && errors.Is(err, exec.ErrNotFound) {
			t.Skipf("needs: %s", mkfs[0])
		}
		t.Fatalf("%s: %v\n%s", mkfs[0], err, out)
	}
	at = t.TempDir()
	mountDisk(t, image, at, kind, option)
	return at
}

func mountDisk(t *testing.T, image, at, kind, option string) {
	t.Helper()
	l, _, err := ensureLoopDevice(image)
	must(t, err)
	defer l.Close()
	if err := unix.Mount(l.Name(), at, kind, 0, option); err != nil {
		if os.Getenv(needsQuotas) == "" {
			t.Skipf("needs: a kernel that has project quotas on %s: %v", kind, err)
		}
		t.Fatalf("mounting %s with option %q: %v", kind, option, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	if why := (kernelQuotas{}).checkReady(at); why != nil && option != "" && os.Getenv(needsQuotas) == "" {
		t.Skipf("needs: a kernel that has project quotas on %s: %v", kind, why)
	}
}

// newOn returns a driver with volumes on a disk.
func newOn(t *testing.T, at string, limit int64) *bench {
	b := newBench(t, limit)
	b.cfg.Root = filepath.Join(at, "volumes")
	must(t, os.MkdirAll(b.cfg.Root, 0o711))
	return b
}

// writeAsPod writes a file in a process with the rights of a pod, and returns its error.
func writeAsPod(t *testing.T, path string, size int64) error {
	t.Helper()
	c := exec.Command("/proc/self/exe", "-test.run=^TestWriteAsPod$")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", asPod, path, size))
	out, err := c.CombinedOutput()
	if err == nil {
		return nil
	}
	for _, known := range []syscall.Errno{unix.EDQUOT, unix.ENOSPC} {
		if strings.Contains(string(out), known.Error()) {
			return known
		}
	}
	return fmt.Errorf("%w: %s", err, out)
}

// TestWriteAsPod is the process of writeAsPod and not a test.
func TestWriteAsPod(t *testing.T) {
	var path string
	var size int64
	if _, err := fmt.Sscan(os.Getenv(asPod), &path, &size); err != nil {
		t.Skip("it is run by others")
	}
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY, 0) // only root may open the path
	must(t, err)
	must(t, unix.Setgroups(nil))
	must(t, unix.Setresgid(1000, 1000, 1000))
	must(t, unix.Setresuid(1000, 1000, 1000)) // this drops all capabilities
	fd, err := unix.Openat(dir, filepath.Base(path), unix.O_CREAT|unix.O_WRONLY, 0o600)
	must(t, err)
	f := os.NewFile(uintptr(fd), path)
	for chunk := make([]byte, mib); size > 0; size -= mib {
		_, err := f.Write(chunk[:min(size, mib)])
		must(t, err)
	}
	must(t, f.Sync())
	must(t, f.Close())
}

// F110: the kernel enforces the size of a folder and reports it as the size of the file system. It
// grows while it is used. Without quotas on the file system, nothing is enforced.
func TestProjectQuotas(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) { projectQuotas(t, newOn(t, quotaDisk(t, kind, "prjquota"), 0), kind) })
	}
}

func projectQuotas(t *testing.T, b *bench, kind string) {
	if b.folders.quotas.mayShareBlocks(b.cfg.Root) != (kind == "xfs") {
		t.Errorf("%s shares blocks: %v", kind, b.folders.quotas.mayShareBlocks(b.cfg.Root))
	}
	must(t, b.createDirectory("v", 20*mib))
	must(t, b.createDirectory("w", 16*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	st, err := os.Stat(at)
	must(t, err)
	if left, err := os.ReadDir(at); err != nil || len(left) != 0 || st.Mode().Perm() != 0o777 {
		t.Errorf("a new volume has %v, mode %s, %v", left, st.Mode(), err)
	}
	size := func() int64 {
		var fs unix.Statfs_t
		must(t, unix.Statfs(at, &fs))
		return int64(fs.Blocks) * fs.Bsize
	}
	if size() != 20*mib {
		t.Errorf("statfs tells a size of %d", size())
	}
	must(t, os.Mkdir(filepath.Join(at, "deep"), 0o777))
	must(t, os.Chmod(filepath.Join(at, "deep"), 0o777))
	if err := writeAsPod(t, filepath.Join(at, "deep", "large"), 24*mib); !errors.Is(err, unix.EDQUOT) &&
		!errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing 24 MiB to a volume of 20: %v", err)
	}
	must(t, os.Remove(filepath.Join(at, "deep", "large")))
	rv, _, err := b.store.readVolume("v")
	must(t, err)
	b.falls(t, rv.Project, func(u projectUsage) bool { return u.bytes < mib })
	must(t, b.expand("v", 40*mib))
	if size() != 40*mib {
		t.Errorf("having grown statfs tells a size of %d", size())
	}
	must(t, writeAsPod(t, filepath.Join(at, "deep", "large"), 24*mib))
	res, err := b.node.NodeGetVolumeStats(t.Context(), &spec.NodeGetVolumeStatsRequest{VolumeId: "v", VolumePath: at})
	must(t, err)
	bytes, inodes := res.Usage[0], res.Usage[1]
	if bytes.Total != 40*mib || bytes.Used < 24*mib || bytes.Used > 25*mib ||
		bytes.Available != bytes.Total-bytes.Used || inodes.Used != 3 || inodes.Total != 2560 {
		t.Errorf("stats: %v", res)
	}
	sum, open, err := b.space.reservedBytes()
	if want := int64(56 * mib); kind == "ext4" && (open > want-24*mib || open < want-25*mib) ||
		kind == "xfs" && open != want || sum != want || err != nil {
		t.Errorf("promised %d, open %d, %v", sum, open, err)
	}
	wants(t, "deleting it in use", b.delete("v"), codes.FailedPrecondition, "in use at "+at)
	must(t, b.unstage("v"))
	rw, _, err := b.store.readVolume("w")
	must(t, err)
	if u, err := b.folders.quotas.usageOf(b.cfg.Root, rw.Project); u.bytes > 64<<10 || !u.limited || err != nil {
		t.Errorf("the other volume: %+v, %v", u, err)
	}
	// A driver with another folder on the same disk uses other project IDs.
	other := newOn(t, b.cfg.Root, 0)
	must(t, other.createDirectory("v", 16*mib))
	if ro, _, err := other.store.readVolume("v"); ro.Project == rv.Project || ro.Project == rw.Project || err != nil {
		t.Errorf("project %d is two volumes', %v", ro.Project, err)
	}
	for _, one := range []*bench{b, other} {
		must(t, one.delete("v"))
		must(t, one.folders.emptyTrash(t.Context()))
	}
	b.falls(t, rv.Project, projectUsage.isUnused)
	must(t, b.delete("w"))
	must(t, b.folders.emptyTrash(t.Context()))
	nothingLeft(t, b.cfg.Root)
}

// falls waits until the usage of a project is low enough. XFS releases removed files with a delay.
func (b *bench) falls(t *testing.T, project uint32, enough func(projectUsage) bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(30 * time.Second); ; <-tick.C {
		u, err := b.folders.quotas.usageOf(b.cfg.Root, project)
		must(t, err)
		if enough(u) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("of what was deleted is left %+v", u)
		}
	}
}

// If a disk has lost its quotas, no volume is staged, because its size would not be enforced. The
// data stay.
func TestQuotasGone(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			disk := quotaDisk(t, kind, "prjquota")
			b := newOn(t, disk, 0)
			must(t, b.createDirectory("v", 16*mib))
			must(t, os.WriteFile(filepath.Join(b.folders.directoryPath("v"), "data"), []byte("kept"), 0o644))
			f, err := os.Open(disk)
			must(t, err)
			var st unix.Stat_t
			must(t, unix.Fstat(int(f.Fd()), &st))
			must(t, f.Close())
			dev := fmt.Sprintf("/dev/loop%d", unix.Minor(st.Dev))
			held, err := os.Open(dev)
			must(t, err)
			defer held.Close()
			again := func(option string) {
				must(t, unix.Unmount(disk, 0))
				must(t, unix.Mount(dev, disk, kind, 0, option))
			}
			again("")
			wants(t, "staging without quotas", b.stage("v"), codes.FailedPrecondition,
				"mount it with the option prjquota")
			wants(t, "making one without quotas", b.createDirectory("w", 16*mib), codes.FailedPrecondition,
				"mount it with the option prjquota")
			if _, err := b.GetCapacity(t.Context(),
				&spec.GetCapacityRequest{Parameters: map[string]string{backingParam: backingDirectory}}); status.Code(
				err) != codes.FailedPrecondition {
				t.Errorf("room without quotas: %v", err)
			}
			again("prjquota")
			must(t, b.stage("v"))
			if text, err := os.ReadFile(filepath.Join(b.dir, "staging", "data")); string(text) != "kept" || err != nil {
				t.Errorf("the data: %q, %v", text, err)
			}
			if err := writeAsPod(t, filepath.Join(b.dir, "staging", "large"), 20*mib); !errors.Is(err, unix.EDQUOT) &&
				!errors.Is(err, unix.ENOSPC) {
				t.Errorf("writing 20 MiB to a volume of 16: %v", err)
			}
			must(t, b.unstage("v"))
			must(t, b.delete("v"))
			must(t, b.folders.emptyTrash(t.Context()))
			nothingLeft(t, b.cfg.Root)
		})
	}
}

// F110: csi-sanity with folders whose size the kernel enforces.
func TestSanityOfQuotas(t *testing.T) {
	sanityOfFolders(t, filepath.Join(quotaDisk(t, "ext4", "prjquota"), "volumes"))
}
