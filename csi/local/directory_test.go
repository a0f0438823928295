package local

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/csi/privatemounts"
)

// paper is a quotaBackend that records quotas without enforcing them.
type paper struct {
	mu      sync.Mutex
	root    string
	why     error // why there are no quotas
	sharing bool
	limits  map[uint32]int64
	bearers map[uint64]uint32 // project IDs by inode
}

func newPaper(root string) *paper {
	return &paper{root: root, limits: map[uint32]int64{}, bearers: map[uint64]uint32{}}
}

func (p *paper) checkReady(string) error { return p.why }

func (p *paper) mayShareBlocks(string) bool { return p.sharing }

func (p *paper) setLimit(_ string, id uint32, bytes, _ int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.limits[id] = bytes; bytes == 0 {
		delete(p.limits, id)
	}
	return nil // a kernel without enforcement accepts limits too
}

func (p *paper) usageOf(_ string, id uint32) (u projectUsage, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, u.limited = p.limits[id]
	for _, sub := range []string{foldersDir, trashDir} {
		entries, _ := os.ReadDir(filepath.Join(p.root, sub))
		for _, e := range entries {
			if st, err := e.Info(); err != nil || p.bearers[st.Sys().(*syscall.Stat_t).Ino] != id {
				continue
			}
			files, _ := os.ReadDir(filepath.Join(p.root, sub, e.Name()))
			u.inodes++
			for _, f := range files {
				if st, err := f.Info(); err == nil {
					u.bytes += st.Size()
					u.inodes++
				}
			}
		}
	}
	return u, p.why
}

func (p *paper) setProject(dir string, id uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	st, err := os.Stat(dir)
	if err == nil {
		p.bearers[st.Sys().(*syscall.Stat_t).Ino] = id
	}
	return err
}

func (p *paper) projectIDOf(dir string) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	st, err := os.Stat(dir)
	if err != nil {
		return 0, err
	}
	return p.bearers[st.Sys().(*syscall.Stat_t).Ino], nil
}

// folders calls a driver for folders with recorded quotas.
type folders struct {
	*bench
	quotas *paper
}

func newFolders(t *testing.T, limit int64) folders {
	b := folders{bench: newBench(t, limit)}
	b.quotas = newPaper(b.cfg.Root)
	b.Driver.folders.quotas = b.quotas
	return b
}

func (b *bench) createDirectory(id string, size int64) error {
	_, err := b.CreateVolume(b.t.Context(),
		&spec.CreateVolumeRequest{Name: id, VolumeCapabilities: []*spec.VolumeCapability{writer},
			CapacityRange: &spec.CapacityRange{RequiredBytes: size},
			Parameters:    map[string]string{backingParam: backingDirectory}})
	return err
}

func (b *bench) publishReadOnly(id string) error {
	_, err := b.node.NodePublishVolume(b.t.Context(),
		&spec.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: filepath.Join(b.dir, "staging"),
			TargetPath: filepath.Join(b.dir, "target"), VolumeCapability: writer, Readonly: true})
	return err
}

func (b *bench) unpublish(id string) error {
	_, err := b.node.NodeUnpublishVolume(b.t.Context(),
		&spec.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: filepath.Join(b.dir, "target")})
	return err
}

// wants checks the code of an error and a part of its message.
func wants(t *testing.T, what string, err error, code codes.Code, words string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(fmt.Sprint(err), words) {
		t.Errorf("%s: %v, want %s and %q", what, err, code, words)
	}
}

// F110: a class determines the backing of its volumes. A request that a folder cannot satisfy is
// refused with the reason, and leaves nothing.
func TestBackings(t *testing.T) {
	b := newFolders(t, 0)
	mounts := func(fs string, flags ...string) *spec.VolumeCapability {
		return &spec.VolumeCapability{AccessMode: writer.AccessMode, AccessType: &spec.VolumeCapability_Mount{
			Mount: &spec.VolumeCapability_MountVolume{FsType: fs, MountFlags: flags}}}
	}
	ask := func(key, value string, c *spec.VolumeCapability, s *spec.VolumeContentSource) error {
		_, err := b.CreateVolume(t.Context(), &spec.CreateVolumeRequest{Name: "v",
			VolumeCapabilities: []*spec.VolumeCapability{c}, VolumeContentSource: s,
			CapacityRange: &spec.CapacityRange{RequiredBytes: 16 * mib}, Parameters: map[string]string{key: value}})
		return err
	}
	of :=
		&spec.VolumeContentSource{
			Type: &spec.VolumeContentSource_Volume{Volume: &spec.VolumeContentSource_VolumeSource{VolumeId: "x"}}}
	const d = backingDirectory
	wants(t, "an unknown parameter", ask("colour", "red", writer, nil), codes.InvalidArgument,
		`parameter "colour" of the class is unknown: this driver supports "backing"`)
	wants(t, "an unknown backing", ask(backingParam, "Directory", writer, nil), codes.InvalidArgument,
		`"Directory": it can be "image" or "directory"`)
	wants(t, "a device", ask(backingParam, d, device, nil), codes.InvalidArgument,
		"are folders, not block devices: use a class with backing: image")
	wants(t, "a file system", ask(backingParam, d, mounts("ext4"), nil), codes.InvalidArgument,
		"leave csi.storage.k8s.io/fstype out")
	wants(t, "options of a file system", ask(backingParam, d, mounts("", "noatime", "data=journal"), nil),
		codes.InvalidArgument, "supports ro, nosuid")
	wants(t, "a copy", ask(backingParam, d, writer, of), codes.InvalidArgument,
		"start empty: use a class with backing: image")
	nothingLeft(t, b.cfg.Root)
	must(t, ask(backingParam, d, mounts("", "nosuid,noatime"), nil))
	must(t, ask(backingParam, d, writer, nil))
	wants(t, "the same as an image", b.create("v", 16*mib), codes.AlreadyExists, "of another backing")
	_, err := b.CreateSnapshot(t.Context(), &spec.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v"})
	wants(t, "a snapshot", err, codes.FailedPrecondition,
		"volume v is a folder (its class has backing: directory), which cannot be frozen")
	must(t, b.create("i", 16*mib))
	_, err = b.groups.CreateVolumeGroupSnapshot(t.Context(),
		&spec.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{"i", "v"}})
	wants(t, "a group of snapshots", err, codes.FailedPrecondition,
		"volume v is a folder (its class has backing: directory)")
	must(t, b.delete("i"))
	of.GetVolume().VolumeId = "v"
	_, err = b.CreateVolume(t.Context(), &spec.CreateVolumeRequest{Name: "w",
		VolumeCapabilities: []*spec.VolumeCapability{writer}, VolumeContentSource: of})
	wants(t, "a clone", err, codes.FailedPrecondition, "no clones")
	_, err = b.node.NodeStageVolume(t.Context(),
		&spec.NodeStageVolumeRequest{VolumeId: "v", StagingTargetPath: filepath.Join(b.dir, "staging"),
			VolumeCapability: device})
	wants(t, "staging as a device", err, codes.InvalidArgument, "volume v is a folder")
	must(t, b.delete("v"))
	must(t, b.folders.emptyTrash(t.Context()))
	must(t, ask(backingParam, backingImage, writer, nil))
	must(t, b.delete("v"))
	nothingLeft(t, b.cfg.Root)
}

// Without project quotas on the disk, the claim gets the reason and the remedy, and the scheduler
// does not use the node.
func TestWithoutProjectQuotas(t *testing.T) {
	for name, c := range map[string]struct {
		magic int64
		err   error
		want  string
	}{
		"ext4":      {unix.EXT4_SUPER_MAGIC, nil, "/vols is on ext4 without: unmount it, run tune2fs -O quota,project"},
		"XFS":       {unix.XFS_SUPER_MAGIC, unix.ENOSYS, "/vols is on XFS without: mount it with the option prjquota"},
		"btrfs":     {unix.BTRFS_SUPER_MAGIC, unix.ENOSYS, "/vols is on btrfs, which has none: put it on ext4 or XFS"},
		"tmpfs":     {unix.TMPFS_MAGIC, unix.EINVAL, "/vols is on tmpfs, which has none"},
		"something": {0x1234, unix.ENOTTY, "a file system of type 0x1234, which has none"},
		"an error":  {0x1234, unix.EIO, "reading those of /vols failed: input/output error"},
	} {
		if got := quotaProblem("/vols", c.magic, c.err).Error(); !strings.Contains(got, c.want) ||
			!strings.HasPrefix(got, "backing: directory needs project quotas, and ") {
			t.Errorf("%s: %s", name, got)
		}
	}
	b := newFolders(t, 0)
	b.quotas.why = quotaProblem(b.cfg.Root, unix.BTRFS_SUPER_MAGIC, nil)
	wants(t, "making one", b.createDirectory("v", 16*mib), codes.FailedPrecondition,
		"making volume v on node w1: backing: directory needs project quotas, and "+b.cfg.Root+" is on btrfs")
	nothingLeft(t, b.cfg.Root)
	capacity := func(backing string, c ...*spec.VolumeCapability) (*spec.GetCapacityResponse, error) {
		return b.GetCapacity(t.Context(), &spec.GetCapacityRequest{Parameters: map[string]string{backingParam: backing},
			VolumeCapabilities: c})
	}
	_, err := capacity(backingDirectory)
	wants(t, "room for folders", err, codes.FailedPrecondition, "is on btrfs")
	if res, err := capacity(backingImage); err != nil || res.AvailableCapacity == 0 {
		t.Errorf("room for images: %v, %v", res, err)
	}
	b.quotas.why = nil
	if res, err := capacity(backingDirectory); err != nil || res.AvailableCapacity == 0 {
		t.Errorf("room for folders: %v, %v", res, err)
	}
	if res, err := capacity(backingDirectory, device); err != nil || res.AvailableCapacity != 0 {
		t.Errorf("room for devices in folders: %v, %v", res, err)
	}
	must(t, b.createDirectory("v", 16*mib))
	b.quotas.why = errors.New("they were taken away")
	wants(t, "staging", b.stage("v"), codes.FailedPrecondition, "staging volume v on node w1: they were taken away")
	must(t, b.delete("v"))
	b.quotas.why = nil
	must(t, b.folders.emptyTrash(t.Context()))
	nothingLeft(t, b.cfg.Root)
}

// F110: after a driver was killed between any two steps, repeating the call completes a folder, and
// deleting it leaves neither data nor a quota.
func TestKilledBetweenStepsOfFolders(t *testing.T) {
	begun := volumeRecord{Version: recordVersion, Size: 16 * mib, Backing: backingDirectory, Project: firstProject + 5}
	ready := begun
	ready.Ready = true
	mkdir := func(b folders, path string) {
		must(b.t, os.MkdirAll(path, 0o700))
		must(b.t, b.quotas.setProject(path, begun.Project))
		must(b.t, os.WriteFile(filepath.Join(path, "data"), []byte("x"), 0o600))
	}
	for name, c := range map[string]struct {
		state func(b folders)
		gone  bool // its deletion had started
	}{
		"before anything": {state: func(folders) {}},
		"record begun":    {state: func(b folders) { must(b.t, b.store.writeVolume("v", begun)) }},
		"limit set": {state: func(b folders) {
			must(b.t, b.store.writeVolume("v", begun))
			must(b.t, b.folders.setSizeLimit(begun))
		}},
		"folder made": {state: func(b folders) {
			must(b.t, b.store.writeVolume("v", begun))
			must(b.t, b.folders.setSizeLimit(begun))
			must(b.t, os.MkdirAll(b.folders.directoryPath("v"), 0o700))
		}},
		"folder marked": {state: func(b folders) {
			must(b.t, b.store.writeVolume("v", begun))
			must(b.t, b.folders.createLimitedDirectory("v", begun))
		}},
		"made": {state: func(b folders) { must(b.t, b.createDirectory("v", 16*mib)) }},
		"growing, not held to": {state: func(b folders) {
			must(b.t, b.createDirectory("v", 16*mib))
			r, _, err := b.store.readVolume("v")
			must(b.t, err)
			r.Size = 20 * mib
			must(b.t, b.store.writeVolume("v", r))
		}},
		"in the trash, with its record": {gone: true, state: func(b folders) {
			must(b.t, b.store.writeVolume("v", ready))
			must(b.t, b.folders.setSizeLimit(ready))
			mkdir(b, b.folders.trashPath(begun.Project))
		}},
		"in the trash": {gone: true, state: func(b folders) {
			must(b.t, b.folders.setSizeLimit(ready))
			mkdir(b, b.folders.trashPath(begun.Project))
		}},
		"emptied, with its record": {gone: true, state: func(b folders) {
			must(b.t, b.store.writeVolume("v", ready))
			must(b.t, os.MkdirAll(b.folders.trashPath(begun.Project), 0o700))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFolders(t, 0)
			c.state(b)
			b.again(0)
			must(t, b.folders.emptyTrash(t.Context()))
			if !c.gone {
				must(t, b.createDirectory("v", 16*mib))
				if name == "growing, not held to" {
					must(t, b.expand("v", 20*mib))
				}
				r, _, err := b.store.readVolume("v")
				if b.quotas.limits[r.Project] != r.Size || err != nil {
					t.Errorf("held to %v, and the record is %+v, %v", b.quotas.limits, r, err)
				}
				must(t, b.stage("v"))
				must(t, os.WriteFile(filepath.Join(b.dir, "staging", "file"), nil, 0o600))
				wants(t, "deleting it in use", b.delete("v"), codes.FailedPrecondition, "in use")
				must(t, b.unstage("v"))
			}
			b.again(0)
			must(t, b.delete("v"))
			must(t, b.delete("v"))
			must(t, b.folders.emptyTrash(t.Context()))
			nothingLeft(t, b.cfg.Root)
			for _, dir := range []string{foldersDir, trashDir} {
				if left, err := os.ReadDir(filepath.Join(b.cfg.Root, dir)); err == nil && len(left) > 0 {
					t.Errorf("left in %s: %v", dir, left)
				}
			}
			if len(b.quotas.limits) != 0 {
				t.Errorf("quotas are left: %v", b.quotas.limits)
			}
		})
	}
}

// Folders and images are created and deleted. No project ID is used by two volumes, by a volume and
// the trash, or by a volume and another program, and no more space is reserved than there is.
func TestProjectsProperty(t *testing.T) {
	const limit = 200 * mib
	b := newFolders(t, limit)
	// All searches start at the same project ID, so that collisions are frequent.
	r := rand.New(rand.NewPCG(3, 4))
	foreign := map[uint32]bool{}
	for range 80 {
		id := fmt.Sprint("v", r.IntN(6))
		switch r.IntN(5) {
		case 0, 1, 2:
			if h := firstProjectCandidate(b.cfg.Root, id); r.IntN(2) == 0 && !foreign[h] {
				// another program uses the ID
				if u, _ := b.quotas.usageOf("", h); u.isUnused() {
					foreign[h] = true
					must(t, b.quotas.setLimit("", h, 1, 1))
				}
			}
			make := b.create
			if r.IntN(4) > 0 {
				make = b.createDirectory
			}
			if err := make(id, int64(16+r.IntN(40))*mib); err == nil {
				if rec, _, _ := b.store.readVolume(id); rec.Backing == backingDirectory {
					must(t, os.WriteFile(filepath.Join(b.folders.directoryPath(id), "data"), []byte(id), 0o600))
				}
			} else if c := status.Code(err); c != codes.AlreadyExists && c != codes.ResourceExhausted {
				t.Fatal(err)
			}
		case 3:
			must(t, b.delete(id))
		case 4:
			must(t, b.folders.emptyTrash(t.Context()))
			b.again(limit)
		}
		owner := map[uint32]string{}
		claim := func(p uint32, who string) {
			if owner[p] != "" || foreign[p] {
				t.Fatalf("project %d is %s's and %s's (foreign: %v)", p, owner[p], who, foreign[p])
			}
			owner[p] = who
		}
		var sum int64
		must(t, b.store.eachRecord(func(id string, r volumeRecord) {
			sum += r.Size
			if r.Project != 0 {
				claim(r.Project, id)
			}
		}))
		all, err := b.folders.trashedProjects()
		must(t, err)
		for _, p := range all {
			claim(p, "the trash")
		}
		if sum > limit {
			t.Fatalf("%d bytes are promised, of %d", sum, limit)
		}
	}
}

// The unused part of a folder is reserved, or its whole size if blocks may be shared.
func TestRoomOfFolders(t *testing.T) {
	b := newFolders(t, 100*mib)
	must(t, b.createDirectory("a", 60*mib))
	wants(t, "a folder too many", b.createDirectory("b", 60*mib), codes.ResourceExhausted,
		"volume b wants 60 MiB, and node w1 has 40 MiB left for volumes")
	wants(t, "an image too many", b.create("b", 60*mib), codes.ResourceExhausted, "40 MiB left")
	wants(t, "growing too far", b.expand("a", 101*mib), codes.ResourceExhausted, "")
	must(t, b.expand("a", 61*mib))
	must(t, os.WriteFile(filepath.Join(b.folders.directoryPath("a"), "data"), make([]byte, mib), 0o600))
	for sharing, want := range map[bool]int64{false: 60 * mib, true: 61 * mib} {
		b.quotas.sharing = sharing
		if sum, open, err := b.space.reservedBytes(); sum != 61*mib || open != want || err != nil {
			t.Errorf("sharing %v: promised %d, of which %d are open, %v", sharing, sum, open, err)
		}
	}
	b.quotas.sharing = false
	must(t, b.delete("a"))
	if sum, open, err := b.space.reservedBytes(); sum != mib || open != 0 || err != nil {
		t.Errorf("of what is deleted %d are promised, and %d open, %v", sum, open, err)
	}
	must(t, b.folders.emptyTrash(t.Context()))
	if sum, _, err := b.space.reservedBytes(); sum != 0 || err != nil {
		t.Errorf("promised: %d, %v", sum, err)
	}
}

// The trash is deleted in the background, in steps, and also after a driver restart. DeleteVolume
// does not wait for it.
func TestTrash(t *testing.T) {
	b := newFolders(t, 0)
	must(t, b.createDirectory("v", 16*mib))
	const files = removeBatch + 10
	for i := range files {
		must(t, os.WriteFile(filepath.Join(b.folders.directoryPath("v"), strconv.Itoa(i)), nil, 0o600))
	}
	r, _, err := b.store.readVolume("v")
	must(t, err)
	must(t, b.delete("v"))
	if left, err := os.ReadDir(b.folders.trashPath(r.Project)); len(left) != files || err != nil {
		t.Errorf("deleting has removed %d files, %v", files-len(left), err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if err := b.folders.emptyTrash(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
	if len(b.quotas.limits) != 1 {
		t.Errorf("the quota went before its data: %v", b.quotas.limits)
	}
	must(t, b.createDirectory("v", 16*mib))
	if again, _, err := b.store.readVolume("v"); again.Project == r.Project || err != nil {
		t.Errorf("a new volume has the project id of what is being deleted: %d, %v", again.Project, err)
	}
	b.again(0)
	stop := serveOn(t, b.Driver)
	must(t, waitGone(t, b.folders.trashPath(r.Project)))
	must(t, b.delete("v"))
	must(t, waitGone(t, b.folders.trashPath(firstProjectCandidate(b.cfg.Root, "v"))))
	stop()
	nothingLeft(t, b.cfg.Root)
}

// F110: csi-sanity with folders, which have no snapshots. It runs once in a process.
func TestSanityOfFolders(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	sanityOfFolders(t, "")
}

func sanityOfFolders(t *testing.T, root string) {
	t.Helper()
	c := exec.Command("/proc/self/exe", "-test.run=^TestSanity$", "-test.v", "-ginkgo.skip=[Ss]napshot|source volume")
	c.Env = append(os.Environ(), sanityBacking+"="+backingDirectory, sanityRoot+"="+root)
	if out, err := c.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestSanity")) {
		t.Errorf("%v\n%s", err, out)
	}
}

// The mount options of a volume stay when a pod mounts it read-only.
func TestOptionsStay(t *testing.T) {
	b := newFolders(t, 0)
	careful := &spec.VolumeCapability{AccessMode: writer.AccessMode, AccessType: &spec.VolumeCapability_Mount{
		Mount: &spec.VolumeCapability_MountVolume{MountFlags: []string{"nosuid,nodev", "noexec", "noatime"}}}}
	for id, create := range map[string]func(string, int64) error{"image": b.create,
		"folder": b.createDirectory} {
		must(t, create(id, 16*mib))
		_, err := b.node.NodeStageVolume(t.Context(),
			&spec.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: filepath.Join(b.dir, "staging"),
				VolumeCapability: careful})
		must(t, err)
		must(t, b.publishReadOnly(id))
		for at, want := range map[string]uintptr{"staging": 0, "target": unix.MS_RDONLY} {
			want |= unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME
			if have, err := mountFlagsOf(filepath.Join(b.dir, at)); have != want || err != nil {
				t.Errorf("%s of the %s has options %#x, not %#x, %v", at, id, have, want, err)
			}
		}
		must(t, b.unpublish(id))
		must(t, b.unstage(id))
		must(t, b.delete(id))
	}
}

// The record of a later release is left alone, and its space stays reserved.
func TestLaterRecord(t *testing.T) {
	b := newFolders(t, 100*mib)
	must(t, b.store.writeVolume("v", volumeRecord{Version: recordVersion + 1, Size: 60 * mib, Ready: true, Project: 7}))
	for what, err := range map[string]error{"making it": b.createDirectory("v", 16*mib), "staging it": b.stage("v"),
		"deleting it": b.delete("v"), "growing it": b.expand("v", 61*mib)} {
		wants(t, what, err, codes.Internal, "written by a later release")
	}
	wants(t, "another", b.create("w", 50*mib), codes.ResourceExhausted, "40 MiB left")
	must(t, b.createDirectory("w", 40*mib))
}

// A project ID in a record or in the trash is not used again, even if the kernel has no quota for
// it. Neither is an ID that only the kernel has.
func TestProjectsThatAreTaken(t *testing.T) {
	b := newFolders(t, 0)
	first := firstProjectCandidate(b.cfg.Root, "v")
	must(t, b.store.writeVolume("begun", volumeRecord{Version: recordVersion, Size: 16 * mib, Backing: backingDirectory,
		Project: first}))
	must(t, os.MkdirAll(b.folders.trashPath(first+1), 0o700))
	must(t, b.quotas.setLimit("", first+2, 1, 1))
	must(t, b.createDirectory("v", 16*mib))
	if r, _, err := b.store.readVolume("v"); r.Project != first+3 || err != nil {
		t.Errorf("it has project %d, and %d to %d are taken, %v", r.Project, first, first+2, err)
	}
}
