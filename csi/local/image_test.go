package local

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/reservedspace"
)

var writer = &spec.VolumeCapability{
	AccessType: &spec.VolumeCapability_Mount{Mount: &spec.VolumeCapability_MountVolume{}},
	AccessMode: &spec.VolumeCapability_AccessMode{Mode: spec.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}

// nothingLeft checks that there are no volumes, and no parts of volumes, below a root.
func nothingLeft(t *testing.T, root string) {
	t.Helper()
	if err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			t.Errorf("left: %s", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// bench is a driver that is called without a socket.
type bench struct {
	t *testing.T
	*Driver
	dir string
}

func newBench(t *testing.T, limit int64) *bench {
	privatemounts.SkipUnlessPrivate(t)
	b := &bench{t: t, dir: t.TempDir()}
	b.again(limit)
	t.Cleanup(func() { // mounts of a failed test would keep its folder
		for _, at := range []string{"staging", "target"} {
			_ = unmountAll(filepath.Join(b.dir, at))
		}
	})
	return b
}

// again replaces the driver, as after a restart.
func (b *bench) again(limit int64) {
	var q quotaBackend
	if b.Driver != nil {
		q = b.folders.quotas
	}
	b.Driver = New(Config{Root: filepath.Join(b.dir, "volumes"), NodeID: "w1", Limit: limit,
		KeepFree: reservedspace.Bytes(mib)})
	if q != nil {
		b.folders.quotas = q
	}
	must(b.t, os.MkdirAll(b.cfg.Root, 0o711))
}

func (b *bench) create(id string, size int64) error {
	_, err := b.CreateVolume(b.t.Context(),
		&spec.CreateVolumeRequest{Name: id, VolumeCapabilities: []*spec.VolumeCapability{writer},
			CapacityRange: &spec.CapacityRange{RequiredBytes: size}})
	return err
}

func (b *bench) stage(id string) error {
	_, err := b.node.NodeStageVolume(b.t.Context(),
		&spec.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: filepath.Join(b.dir, "staging"),
			VolumeCapability: writer, VolumeContext: map[string]string{sizedContextKey: "true"}})
	return err
}

func (b *bench) unstage(id string) error {
	_, err := b.node.NodeUnstageVolume(b.t.Context(),
		&spec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: filepath.Join(b.dir, "staging")})
	return err
}

func (b *bench) expand(id string, size int64) error {
	_, err := b.ControllerExpandVolume(b.t.Context(),
		&spec.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &spec.CapacityRange{RequiredBytes: size}})
	return err
}

func (b *bench) delete(id string) error {
	_, err := b.DeleteVolume(b.t.Context(), &spec.DeleteVolumeRequest{VolumeId: id})
	return err
}

// canGrow reports whether the tests may grow mounted file systems.
func canGrow(t *testing.T) bool {
	b, err := os.ReadFile("/proc/self/status")
	must(t, err)
	_, rest, _ := strings.Cut(string(b), "CapEff:\t")
	var mask uint64
	_, err = fmt.Sscanf(rest, "%x", &mask)
	must(t, err)
	return mask&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// F110: a volume has exactly the requested size, is initially empty, and is writable for any user.
func TestSizeIsKeptTo(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 20*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	st, err := os.Stat(at)
	must(t, err)
	if left, err := os.ReadDir(at); err != nil || len(left) != 0 || st.Mode().Perm() != 0o777 {
		t.Errorf("a new volume has %v, mode %s, %v", left, st.Mode(), err)
	}
	must(t, os.Chmod(at, 0o700))
	if err := os.WriteFile(filepath.Join(at, "large"), make([]byte, 24*mib), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("writing 24 MiB to a volume of 20: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(at, "large"), []byte("kept"), 0o600))
	if err := b.delete("v"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("deleting a volume in use: %v", err)
	}
	must(t, b.unstage("v"))
	if l, err := findLoopDevice(b.store.imageFile("v")); l != nil || err != nil {
		t.Errorf("a loop device is left: %v, %v", l, err)
	}
	must(t, b.stage("v"))
	if text, err := os.ReadFile(filepath.Join(at, "large")); err != nil || string(text) != "kept" {
		t.Errorf("the data: %q, %v", text, err)
	}
	if st, err := os.Stat(at); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("what its user made of the mode is %v, %v", st.Mode(), err)
	}
	must(t, b.unstage("v"))
	must(t, os.Remove(b.store.imageFile("v")))
	must(t, os.Remove(b.store.recordFile("v")))
	if err := b.stage("v"); status.Code(err) != codes.NotFound {
		t.Errorf("a volume whose data are gone: %v", err)
	}
	must(t, b.delete("v"))
	nothingLeft(t, b.cfg.Root)
}

// A mounted volume grows while it is used; other volumes grow with the next mount.
func TestVolumesGrow(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 20*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	res, err := b.ControllerExpandVolume(t.Context(),
		&spec.ControllerExpandVolumeRequest{VolumeId: "v", CapacityRange: &spec.CapacityRange{RequiredBytes: 40 * mib}})
	must(t, err)
	onNode := &spec.NodeExpandVolumeRequest{VolumeId: "v", VolumePath: at,
		CapacityRange: &spec.CapacityRange{RequiredBytes: 40 * mib}}
	_, err = b.node.NodeExpandVolume(t.Context(), onNode)
	if res.NodeExpansionRequired == canGrow(t) {
		t.Errorf("the node has to grow it: %v", res.NodeExpansionRequired)
	}
	if !canGrow(t) {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "CAP_SYS_RESOURCE") {
			t.Errorf("growing without the capability: %v", err)
		}
		must(t, b.unstage("v"))
		must(t, b.stage("v"))
		_, err = b.node.NodeExpandVolume(t.Context(), onNode)
	}
	must(t, err)
	onNode.CapacityRange.RequiredBytes = 41 * mib
	if _, err := b.node.NodeExpandVolume(t.Context(), onNode); status.Code(err) != codes.OutOfRange {
		t.Errorf("growing on the node beyond the volume: %v", err)
	}
	must(t, b.expand("v", 40*mib))
	must(t, os.WriteFile(filepath.Join(at, "large"), make([]byte, 24*mib), 0o600))
	must(t, b.unstage("v"))
	must(t, b.expand("v", 60*mib))
	must(t, b.stage("v"))
	must(t, os.WriteFile(filepath.Join(at, "larger"), make([]byte, 20*mib), 0o600))
	must(t, b.unstage("v"))
	must(t, b.delete("v"))
}

// No space is reserved twice, and a full disk is reported.
func TestRoom(t *testing.T) {
	b := newBench(t, 100*mib)
	must(t, b.create("a", 60*mib))
	err := b.create("b", 60*mib)
	if status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "volume b wants 60 MiB, and node w1 has 40 MiB left for volumes") {
		t.Errorf("a volume too many: %v", err)
	}
	if err := b.expand("a", 101*mib); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("growing too far: %v", err)
	}
	for id, size := range map[string]int64{"huge": 1 << 60, "most": 1<<63 - 1, "below": -1} {
		if err := b.create(id, size); err == nil {
			t.Errorf("a volume of %d bytes was made", size)
		}
	}
	must(t, b.create("b", 40*mib))
	res, err := b.GetCapacity(t.Context(), &spec.GetCapacityRequest{})
	if err != nil || res.AvailableCapacity != 0 {
		t.Errorf("left: %v, %v", res, err)
	}
	must(t, b.delete("a"))
	must(t, b.delete("b"))
	nothingLeft(t, b.cfg.Root)
}

// If mkfs.ext4 is missing, the claim's event contains the remedy, and nothing is left.
func TestWithoutTools(t *testing.T) {
	b := newBench(t, 0)
	t.Setenv("PATH", t.TempDir())
	if err := b.create("v", 20*mib); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "install e2fsprogs") {
		t.Errorf("without mkfs.ext4: %v", err)
	}
	nothingLeft(t, b.cfg.Root)
}

// A damaged file system is repaired if no data are lost, and refused otherwise.
func TestDamaged(t *testing.T) {
	b := newBench(t, 0)
	must(t, b.create("v", 20*mib))
	f, err := os.OpenFile(b.store.imageFile("v"), os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(make([]byte, 8192), 0) // the superblock and the group descriptors
	must(t, errors.Join(err, f.Close()))
	if err := b.stage("v"); err == nil {
		t.Error("a volume without its superblock is staged")
	}
	if mounted(t, filepath.Join(b.dir, "staging")) {
		t.Error("it is mounted")
	}
	must(t, b.delete("v"))
}

// After a driver was killed between any two steps, repeating the call completes a volume, and
// deleting it leaves nothing. Each state is the disk between two steps.
func TestKilledBetweenSteps(t *testing.T) {
	states := map[string]func(b *bench){
		"before anything":         func(*bench) {},
		"record begun":            func(b *bench) { must(b.t, b.store.writeVolume("v", volumeRecord{Size: 20 * mib})) },
		"record begun, half file": func(b *bench) { b.half(20 * mib) },
		"file made": func(b *bench) {
			must(b.t, b.store.writeVolume("v", volumeRecord{Size: 20 * mib}))
			must(b.t, createImage(b.t.Context(), b.store.imageFile("v"), 20*mib))
		},
		"made": func(b *bench) { must(b.t, b.create("v", 20*mib)) },
		"growing, not taken": func(b *bench) {
			must(b.t, b.create("v", 20*mib))
			must(b.t, b.store.writeVolume("v", volumeRecord{Size: 24 * mib, Ready: true}))
		},
		"staged once, deleted by half": func(b *bench) {
			must(b.t, b.create("v", 20*mib))
			must(b.t, os.Remove(b.store.imageFile("v")))
		},
	}
	for name, state := range states {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 0)
			state(b)
			b.again(0)
			if name == "staged once, deleted by half" {
				must(t, b.delete("v"))
				nothingLeft(t, b.cfg.Root)
				return
			}
			must(t, b.create("v", 20*mib))
			if name == "growing, not taken" {
				must(t, b.expand("v", 24*mib))
				if st, err := os.Stat(b.store.imageFile("v")); err != nil || st.Size() != 24*mib {
					t.Errorf("the file is %v, %v", st, err)
				}
			} else {
				must(t, b.stage("v"))
				must(t, b.unstage("v"))
				if out, err := exec.Command("e2fsck", "-f", "-n", b.store.imageFile("v")).CombinedOutput(); err != nil {
					t.Errorf("the file system: %v\n%s", err, out)
				}
			}
			b.again(0)
			must(t, b.delete("v"))
			must(t, b.delete("v"))
			nothingLeft(t, b.cfg.Root)
		})
	}
}

func (b *bench) half(size int64) {
	must(b.t, b.store.writeVolume("v", volumeRecord{Size: size}))
	must(b.t, os.MkdirAll(filepath.Dir(b.store.imageFile("v")), 0o700))
	must(b.t, os.WriteFile(b.store.imageFile("v"), []byte("half"), 0o600))
}

// Many volumes are created and deleted, some while in use: no more space is reserved than there is,
// and nothing is left at the end.
func TestVolumesProperty(t *testing.T) {
	const limit = 120 * mib
	b := newBench(t, limit)
	r := rand.New(rand.NewPCG(1, 2))
	model := map[string]int64{}
	for range 60 {
		id, size := fmt.Sprint("v", r.IntN(5)), int64(16+r.IntN(40))*mib
		var sum int64
		for _, s := range model {
			sum += s
		}
		switch r.IntN(3) {
		case 0, 1:
			err := b.create(id, size)
			have, known := model[id]
			switch {
			case known && have >= size && err == nil:
			case known && have < size && status.Code(err) == codes.AlreadyExists:
			case !known && sum+size <= limit && err == nil:
				model[id] = size
			case !known && sum+size > limit && status.Code(err) == codes.ResourceExhausted:
			default:
				t.Fatalf("making %s of %d with %v: %v", id, size, model, err)
			}
		case 2:
			must(t, b.delete(id))
			delete(model, id)
		}
		if r.IntN(4) == 0 {
			b.again(limit)
		}
	}
	for id := range model {
		must(t, b.delete(id))
	}
	nothingLeft(t, b.cfg.Root)
}
