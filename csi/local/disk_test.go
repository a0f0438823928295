package local

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ownDisk gives the driver a disk of its own with a size.
func (b *bench) ownDisk(size string) {
	b.t.Helper()
	must(b.t, unix.Mount("tmpfs", b.cfg.Root, "tmpfs", 0, "size="+size))
	b.t.Cleanup(func() { _ = unix.Unmount(b.cfg.Root, unix.MNT_DETACH) })
}

// says checks the code and a part of the message of an error.
func says(t *testing.T, what string, err error, code codes.Code, words string) {
	t.Helper()
	if status.Code(err) != code || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: %v, want %s with %q", what, err, code, words)
	}
}

// F110: while the disk of the volumes is read-only, every call that would write returns the reason
// and the remedy, and the node has no capacity. Nothing is lost, and all calls work again after the
// disk is writable.
func TestReadOnlyDisk(t *testing.T) {
	b := newBench(t, 0)
	b.ownDisk("200m")
	must(t, b.create("v", 16*mib))
	must(t, b.create("other", 16*mib))
	must(t, b.stage("v"))
	at := filepath.Join(b.dir, "staging")
	must(t, os.WriteFile(filepath.Join(at, "file"), []byte("kept"), 0o600))
	must(t, unix.Mount(b.cfg.Root, b.cfg.Root, "", unix.MS_BIND, ""))
	must(t, unix.Mount("", b.cfg.Root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	const why = "is on a disk that is read-only: the node's kernel log may say why; mount it for writing"
	says(t, "making a volume", b.create("new", 16*mib), codes.ResourceExhausted, why)
	says(t, "growing one", b.expand("v", 32*mib), codes.ResourceExhausted, why)
	says(t, "deleting one", b.delete("other"), codes.Internal, why)
	_, err := b.GetCapacity(t.Context(), &spec.GetCapacityRequest{})
	says(t, "asked for its room", err, codes.FailedPrecondition, why)
	_, err = b.CreateSnapshot(t.Context(), &spec.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v"})
	says(t, "taking a snapshot", err, codes.ResourceExhausted, why)
	must(t, b.create("v", 16*mib)) // it exists
	must(t, b.stage("v"))          // it is staged
	must(t, b.unstage("v"))
	says(t, "staging one", b.stage("v"), codes.Internal, why)
	must(t, unix.Unmount(b.cfg.Root, 0))
	must(t, b.stage("v"))
	if text, err := os.ReadFile(filepath.Join(at, "file")); err != nil || string(text) != "kept" {
		t.Errorf("the data: %q, %v", text, err)
	}
	must(t, b.create("new", 16*mib))
	must(t, b.expand("v", 32*mib))
	must(t, b.unstage("v"))
	for _, id := range []string{"v", "other", "new"} {
		must(t, b.delete(id))
	}
	nothingLeft(t, b.cfg.Root)
}

// F110: if other files have filled the disk, creation and expansion return ResourceExhausted,
// reservations are undone, and a smaller request succeeds.
func TestFullDisk(t *testing.T) {
	b := newBench(t, 0)
	b.ownDisk("64m")
	must(t, b.create("v", 16*mib))
	others := filepath.Join(b.cfg.Root, "others")
	fill := func() { // except the space for a record
		if err := os.WriteFile(others, make([]byte, 64*mib), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("filling the disk: %v", err)
		}
		st, err := os.Stat(others)
		must(t, err)
		must(t, os.Truncate(others, st.Size()-256<<10))
	}
	fill()
	says(t, "making a volume", b.create("new", 16*mib), codes.ResourceExhausted, "node w1 has 0 MiB left for volumes")
	says(t, "growing one", b.expand("v", 32*mib), codes.ResourceExhausted, "node w1 has 0 MiB left for volumes")
	if res, err := b.GetCapacity(t.Context(), &spec.GetCapacityRequest{}); err != nil || res.AvailableCapacity != 0 {
		t.Errorf("its room is %v, %v", res, err)
	}
	// Reserved while there was space; the driver stopped before the allocation.
	r, _, err := b.store.readVolume("v")
	must(t, err)
	r.Size = 32 * mib
	must(t, os.Truncate(others, 1*mib))
	must(t, b.store.writeVolume("v", r))
	fill()
	says(t, "growing one that was promised more", b.expand("v", 32*mib), codes.ResourceExhausted,
		"growing volume v on node w1: the disk of "+b.cfg.Root+" is full: allocating 33554432 bytes")
	if st, err := os.Stat(b.store.imageFile("v")); err != nil || st.Size() != 16*mib {
		t.Errorf("its file has %v bytes, %v", st.Size(), err)
	}
	must(t, b.expand("v", 16*mib)) // the user requests the current size
	if r, _, err := b.store.readVolume("v"); err != nil || r.Size != 16*mib {
		t.Errorf("what is promised is %+v, %v", r, err)
	}
	must(t, os.Remove(others))
	must(t, b.expand("v", 32*mib))
	must(t, b.delete("v"))
}

// F110: a volume with an invalid mount option is not created. The claim gets the option of the
// class that is wrong.
func TestMountOptionsAreJudgedEarly(t *testing.T) {
	b := newBench(t, 0)
	b.ownDisk("64m")
	create := func(flags ...string) error {
		mount := &spec.VolumeCapability{AccessMode: writer.AccessMode,
			AccessType: &spec.VolumeCapability_Mount{Mount: &spec.VolumeCapability_MountVolume{MountFlags: flags}}}
		_, err := b.CreateVolume(t.Context(),
			&spec.CreateVolumeRequest{Name: "v", VolumeCapabilities: []*spec.VolumeCapability{mount},
				CapacityRange: &spec.CapacityRange{RequiredBytes: 16 * mib}})
		return err
	}
	if fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC); err != nil {
		t.Skip("the kernel does not say what it knows:", err)
	} else {
		unix.Close(fs)
	}
	for option, words := range map[string]string{
		"nosuchoption":    `mount option "nosuchoption" is not valid for ext4 (`,
		"data=sometimes":  `mount option "data=sometimes" is not valid for ext4`,
		"commit=often":    `mount option "commit=often" is not valid for ext4`,
		"source=/dev/sda": `mount option "source=/dev/sda" is not valid for ext4`,
	} {
		says(t, option, create("noatime", option), codes.InvalidArgument, words)
		says(t, option, create("noatime", option), codes.InvalidArgument,
			"correct the mountOptions of the claim's StorageClass")
	}
	nothingLeft(t, b.cfg.Root)
	must(t, create("noatime,commit=30", "data=ordered", "discard", "_netdev"))
	must(t, b.delete("v"))
}
