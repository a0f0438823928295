package local

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/csi/privatemounts"
)

var device = &spec.VolumeCapability{
	AccessType: &spec.VolumeCapability_Block{Block: &spec.VolumeCapability_BlockVolume{}},
	AccessMode: &spec.VolumeCapability_AccessMode{Mode: spec.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER}}

// blocks calls a driver for one block device.
type blocks struct {
	*bench
	staging string
}

func (b blocks) stage() error {
	_, err := b.node.NodeStageVolume(b.t.Context(),
		&spec.NodeStageVolumeRequest{VolumeId: "b", StagingTargetPath: b.staging, VolumeCapability: device,
			VolumeContext: map[string]string{sizedContextKey: "true"}})
	return err
}

func (b blocks) publish(target string) error {
	_, err := b.node.NodePublishVolume(b.t.Context(),
		&spec.NodePublishVolumeRequest{VolumeId: "b", StagingTargetPath: b.staging, TargetPath: target,
			VolumeCapability: device})
	return err
}

func (b blocks) unpublish(target string) error {
	_, err := b.node.NodeUnpublishVolume(b.t.Context(),
		&spec.NodeUnpublishVolumeRequest{VolumeId: "b", TargetPath: target})
	return err
}

func (b blocks) unstage() error {
	_, err := b.node.NodeUnstageVolume(b.t.Context(),
		&spec.NodeUnstageVolumeRequest{VolumeId: "b", StagingTargetPath: b.staging})
	return err
}

// F110: a block device has the requested size, and keeps its data across publications and driver
// restarts. It grows, is exclusive to one pod if requested, and leaves no loop device.
func TestBlockDevice(t *testing.T) {
	b := blocks{newBench(t, 0), ""}
	b.staging = filepath.Join(b.dir, "staging")
	target := filepath.Join(b.dir, "target")
	must(t, os.Mkdir(b.staging, 0o750))
	t.Cleanup(func() { _ = unmountAll(target); _ = detachLoopDevice(b.store.imageFile("b")) })
	for range 2 {
		_, err := b.CreateVolume(t.Context(),
			&spec.CreateVolumeRequest{Name: "b", VolumeCapabilities: []*spec.VolumeCapability{device},
				CapacityRange: &spec.CapacityRange{RequiredBytes: 20 * mib}})
		must(t, err)
	}
	if err := b.create("b", 20*mib); status.Code(err) != codes.AlreadyExists {
		t.Errorf("the same volume with a file system: %v", err)
	}
	if err := b.bench.stage("b"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("mounting a block device: %v", err)
	}
	if err := b.publish(target); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("publishing what is not staged: %v", err)
	}
	for range 2 {
		must(t, b.stage())
		must(t, b.publish(target))
	}
	if err := b.publish(filepath.Join(b.dir, "second")); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second pod: %v", err)
	}
	write := func(at int64, text string) {
		f, err := os.OpenFile(target, os.O_RDWR|unix.O_SYNC, 0)
		must(t, err)
		_, err = f.WriteAt([]byte(text), at)
		must(t, err)
		size, err := f.Seek(0, io.SeekEnd)
		must(t, err)
		must(t, f.Close())
		if at+int64(len(text)) > size {
			t.Errorf("%d bytes at %d of %d", len(text), at, size)
		}
	}
	write(19*mib, "kept")
	b.again(0) // the driver is killed
	if err := b.delete("b"); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("deleting a device in use: %v", err)
	}
	must(t, b.expand("b", 32*mib))
	write(31*mib, "grown")
	stats, err := b.node.NodeGetVolumeStats(t.Context(),
		&spec.NodeGetVolumeStatsRequest{VolumeId: "b", VolumePath: target})
	if err != nil || len(stats.Usage) != 1 || stats.Usage[0].Total != 32*mib {
		t.Errorf("stats: %v, %v", stats, err)
	}
	l, err := findLoopDevice(b.store.imageFile("b")) // findLoopDevice opens the device, like a user of it
	must(t, err)
	for range 2 {
		must(t, b.unpublish(target))
	}
	if err := b.unstage(); err == nil {
		t.Error("a device that somebody has open is unstaged")
	}
	must(t, l.Close())
	must(t, b.stage())
	must(t, b.publish(target))
	got := make([]byte, 4)
	f, err := os.Open(target)
	must(t, err)
	_, err = f.ReadAt(got, 19*mib)
	must(t, err)
	must(t, f.Close())
	if !bytes.Equal(got, []byte("kept")) {
		t.Errorf("it holds %q", got)
	}
	must(t, b.unpublish(target))
	for range 2 {
		must(t, b.unstage())
	}
	if l, err := findLoopDevice(b.store.imageFile("b")); l != nil || err != nil {
		t.Errorf("a loop device is left: %v, %v", l, err)
	}
	must(t, b.delete("b"))
	nothingLeft(t, b.cfg.Root)
}

// F110: csi-sanity with block devices. It runs once in a process.
func TestSanityOfBlockDevices(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	c := exec.Command("/proc/self/exe", "-test.run=^TestSanity$", "-test.v")
	c.Env = append(os.Environ(), sanityAccess+"=block")
	if out, err := c.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestSanity")) {
		t.Errorf("%v\n%s", err, out)
	}
}
