package volume

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	v1 "k8s.io/api/core/v1"
)

// Whatever a driver does, nothing below a mount is deleted. The pod's removal waits while something
// is mounted or data is left, and names it. Once the driver behaves, nothing is left.
func TestDriversThatBehaveBadly(t *testing.T) {
	for name, bad := range map[string]struct {
		publish, unpublish, unstage func(string) error
		mounts                      string // substring of the mount error; "" = it is mounted
		ends                        string // substring of the unmount error; "" = it is unmounted
	}{
		"only says it unpublishes": {publishTmpfs, func(string) error { return nil }, nil, "", "is still mounted at"},
		"mounts twice": {func(target string) error {
			return errors.Join(publishTmpfs(target), unix.Mount("tmpfs", target, "tmpfs", 0, ""))
		}, unpublishTmpfs, nil, "", "is still mounted at"},
		"leaves it staged": {publishTmpfs, unpublishTmpfs, publishTmpfs, "", "is still mounted at"},
		"publishes a file": {func(target string) error {
			return os.WriteFile(target, []byte("data"), 0o600)
		}, func(string) error { return nil }, nil, "nothing is mounted", "is a file of 4 bytes"},
		"publishes a folder": {func(target string) error {
			return errors.Join(os.Mkdir(target, 0o750), os.WriteFile(target+"/f", nil, 0o600))
		}, func(string) error { return nil }, nil, "nothing is mounted", "not empty"},
		"fails to publish": {func(string) error { return errors.New("no disk") }, unpublishTmpfs, nil, "no disk", ""},
		"mounts and fails": {func(target string) error {
			return errors.Join(publishTmpfs(target), errors.New("no disk"))
		}, unpublishTmpfs, nil, "no disk", ""},
		"does not unpublish": {publishTmpfs, func(string) error { return errors.New("busy") }, nil, "", "busy"},
	} {
		t.Run(name, func(t *testing.T) {
			v, _, d, claim := withDriver(t)
			d.publish, d.unpublish, d.unstage = bad.publish, bad.unpublish, bad.unstage
			_, err := v.MountAll(t.Context(), newPod("u1", claim))
			if bad.mounts == "" && err != nil || bad.mounts != "" &&
				(err == nil || !strings.Contains(err.Error(), bad.mounts)) {
				t.Errorf("mounting: %v", err)
			}
			target := d.targets[0]
			kept := ""
			if is, _ := isMountPoint(target); is {
				kept = filepath.Join(target, "precious")
				requireNoError(t, os.WriteFile(kept, nil, 0o600))
			}
			v = New(*v.cfg)
			err = v.UnmountAll(t.Context(), "u1")
			if bad.ends == "" && err != nil || bad.ends != "" &&
				(err == nil || !strings.Contains(err.Error(), bad.ends)) {
				t.Errorf("the pod's end: %v", err)
			}
			if is, _ := isMountPoint(target); is && kept != "" && !strings.Contains(name, "twice") {
				if _, err := os.Lstat(kept); err != nil {
					t.Errorf("below a mount something was deleted: %v", err)
				}
			}
			if bad.ends == "" {
				return
			}
			d.unpublish, d.unstage = func(target string) error {
				return errors.Join(unpublishTmpfs(target), os.RemoveAll(target))
			}, unpublishTmpfs
			requireNoError(t, v.UnmountAll(t.Context(), "u1"))
			if _, err := os.Lstat(filepath.Dir(target)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("left: %v", err)
			}
		})
	}
}

// A hung driver does not block its pod forever. What it mounts after the pod's removal is
// unmounted; volumes of pods are not.
func TestDriverThatMountsLate(t *testing.T) {
	v, _, d, claim := withDriver(t)
	begun, go1, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	d.publish = func(target string) error {
		close(begun)
		<-go1
		err := publishTmpfs(target)
		done <- err
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-begun; cancel() }()
	if _, err := v.MountAll(ctx, newPod("u1", claim)); err == nil {
		t.Fatal("a driver that hangs has published")
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u1"))
	target := d.targets[0]
	if _, err := os.Lstat(v.podDir("u1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pod's end waits for a driver that hangs: %v", err)
	}
	requireNoError(t, v.csi.unmountLate()) // nothing yet
	close(go1)
	requireNoError(t, <-done)
	d.publish = publishTmpfs
	m, err := v.MountAll(t.Context(), newPod("u2", claim))
	requireNoError(t, err)
	if !isMountedNow(target) {
		t.Fatal("nothing is mounted late")
	}
	requireNoError(t, v.csi.unmountLate())
	if _, err := os.Lstat(filepath.Dir(target)); !errors.Is(err, os.ErrNotExist) || isMountedNow(target) {
		t.Errorf("what was mounted late is left: %v", err)
	}
	if !isMountedNow(m["data"].HostPath) {
		t.Error("a pod's volume was unmounted")
	}
	requireNoError(t, v.UnmountAll(t.Context(), "u2"))
}

// F110: a driver reports a volume's usage in bytes and inodes. An abnormal condition becomes one
// event of the pod, with the messages of CSI 1.13 and of earlier versions.
func TestHealthAndFigures(t *testing.T) {
	for _, old := range []bool{true, false} {
		can := []spec.NodeServiceCapability_RPC_Type{spec.NodeServiceCapability_RPC_GET_VOLUME_STATS,
			spec.NodeServiceCapability_RPC_GET_VOLUME_HEALTH}
		if old {
			can[1] = 4 // VOLUME_CONDITION
		}
		v, c, d, claim := withDriver(t, can...)
		var events []*v1.Event
		v.cfg.Report = func(e *v1.Event) { events = append(events, e) }
		words := ""
		d.stats = func(q *spec.NodeGetVolumeStatsRequest) (*spec.NodeGetVolumeStatsResponse, error) {
			if q.VolumePath != d.targets[0] || q.StagingTargetPath != d.staged[0] {
				t.Errorf("asked %v", q)
			}
			res := &spec.NodeGetVolumeStatsResponse{Usage: []*spec.VolumeUsage{{Unit: spec.VolumeUsage_BYTES,
				Total: 100, Available: 40, Used: 60},
				{Unit: spec.VolumeUsage_INODES, Total: 10, Available: 4, Used: -1}}}
			if old && words != "" {
				field := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1)
				field = protowire.AppendString(protowire.AppendTag(field, 2, protowire.BytesType), words)
				res.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType),
					field))
			}
			return res, nil
		}
		d.health = func() *spec.VolumeHealth {
			h := &spec.VolumeHealth{}
			if words != "" {
				h.HealthStatuses = []*spec.VolumeHealth_VolumeHealthEntry{{Status: spec.VolumeHealthErrorType_DEGRADED,
					Reason: "Disk", Message: words}}
			}
			return h
		}
		p := newPod("u1", claim)
		c.Put(p)
		_, err := v.MountAll(t.Context(), p)
		requireNoError(t, err)
		disk, ok, err := v.Disk(t.Context(), "u1", "data")
		if err != nil || !ok || disk.Capacity != 100 || disk.Available != 40 || disk.Inodes != 10 ||
			disk.InodesFree != 4 {
			t.Errorf("%+v, %v, %v", disk, ok, err)
		}
		if _, ok, err := v.Disk(t.Context(), "u1", "other"); ok || err != nil {
			t.Errorf("a volume of no driver: %v, %v", ok, err)
		}
		told := map[string]string{}
		for _, words = range []string{"", "a disk is slow", "a disk is slow", ""} {
			v.csi.reportHealth(t.Context(), told)
		}
		if len(events) != 1 || events[0].Reason != "VolumeConditionAbnormal" ||
			!strings.Contains(events[0].Message, "a disk is slow") || events[0].InvolvedObject.UID != "u1" {
			t.Errorf("old %v: events %v", old, events)
		}
		requireNoError(t, v.UnmountAll(t.Context(), "u1"))
		v.csi.reportHealth(t.Context(), told)
		if len(told) != 0 {
			t.Errorf("remembered: %v", told)
		}
	}
}
