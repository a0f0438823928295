package local

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func (b *bench) snapTogether(id string, of ...string) (*spec.VolumeGroupSnapshot, error) {
	res, err := b.groups.CreateVolumeGroupSnapshot(b.t.Context(),
		&spec.CreateVolumeGroupSnapshotRequest{Name: id, SourceVolumeIds: of})
	return res.GetGroupSnapshot(), err
}

func (b *bench) dropTogether(id string, snapshots ...string) error {
	_, err := b.groups.DeleteVolumeGroupSnapshot(b.t.Context(),
		&spec.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: snapshots})
	return err
}

// stageAt stages a volume in a folder of its own until the test ends.
func (b *bench) stageAt(id string) (at string) {
	b.t.Helper()
	at = filepath.Join(b.dir, "staged-"+id)
	b.t.Cleanup(func() { _ = unmountAll(at) })
	_, err := b.node.NodeStageVolume(b.t.Context(), &spec.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: at,
		VolumeCapability: writer, VolumeContext: map[string]string{sizedContextKey: "true"}})
	must(b.t, err)
	return at
}

func (b *bench) unstageAt(id string) {
	b.t.Helper()
	_, err := b.node.NodeUnstageVolume(b.t.Context(),
		&spec.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: filepath.Join(b.dir, "staged-"+id)})
	must(b.t, err)
}

// F110: the copies of a group have one moment. If a program writes to one volume and then to
// another, the copy of the second is never newer than that of the first, and at most one write
// behind.
func TestGroupIsOfOneMoment(t *testing.T) {
	b := newBench(t, 0)
	volumes := []string{"va", "vb", "vc"}
	at := map[string]string{}
	for _, v := range volumes {
		must(t, b.create(v, 20*mib))
		at[v] = b.stageAt(v)
	}
	// Not in the order in which they are frozen.
	stop := counting(t, filepath.Join(at["vc"], "count"), filepath.Join(at["va"], "count"),
		filepath.Join(at["vb"], "count"))
	var groups []*spec.VolumeGroupSnapshot
	for i := range 4 {
		g, err := b.snapTogether(fmt.Sprint("g", i), volumes...)
		if err != nil {
			t.Fatal(err)
		}
		groups = append(groups, g)
	}
	stop()
	for _, v := range volumes {
		b.unstageAt(v)
	}
	for i, g := range groups {
		if len(g.Snapshots) != 3 || !g.ReadyToUse || g.GroupSnapshotId != fmt.Sprint("g", i) {
			t.Fatalf("group %d: %v", i, g)
		}
		n := map[string]int{}
		for k, s := range g.Snapshots {
			if s.GroupSnapshotId != g.GroupSnapshotId || !s.ReadyToUse ||
				!s.CreationTime.AsTime().Equal(g.CreationTime.AsTime()) {
				t.Errorf("snapshot of a group: %v", s)
			}
			id := fmt.Sprintf("c%d-%d", i, k)
			_, err := b.createOf(id, 20*mib, ofSnapshot(s.SnapshotId))
			must(t, err)
			text, err := os.ReadFile(filepath.Join(b.stageAt(id), "count"))
			must(t, err)
			var got int
			_, err = fmt.Sscanf(string(text), "%d", &got)
			must(t, err)
			n[s.SourceVolumeId] = got
			b.unstageAt(id)
		}
		if first, second, third := n["vc"], n["va"], n["vb"]; second > first || third > second || first-third > 1 {
			t.Errorf("group %d has %d, %d and %d", i, first, second, third)
		}
	}
}

// A group is found by its name and deleted as a whole. Volumes created from it stay.
func TestGroupOfSnapshots(t *testing.T) {
	b := newBench(t, 0)
	must(t, errors.Join(b.create("v1", 16*mib), b.create("v2", 20*mib)))
	b.write("v1", "data", "one")
	b.write("v2", "data", "two")
	g, err := b.snapTogether("g", "v2", "v1")
	must(t, err)
	again, err := b.snapTogether("g", "v1", "v2")
	must(t, err)
	if g.String() != again.String() {
		t.Errorf("asked again it is %v, was %v", again, g)
	}
	b.write("v1", "data", "changed")
	var ids []string
	for _, s := range g.Snapshots {
		ids = append(ids, s.SnapshotId)
		_, err := b.createOf("of-"+s.SourceVolumeId, s.SizeBytes, ofSnapshot(s.SnapshotId))
		must(t, err)
	}
	got, err := b.groups.GetVolumeGroupSnapshot(t.Context(),
		&spec.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "g", SnapshotIds: ids})
	if err != nil || got.GetGroupSnapshot().String() != g.String() {
		t.Errorf("asked for, it is %v, %v", got, err)
	}
	is := func(what string, err error, want codes.Code, words string) {
		t.Helper()
		if status.Code(err) != want || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v, want %s and %q", what, err, want, words)
		}
	}
	is("one of its snapshots", b.drop(ids[0]), codes.InvalidArgument, "is part of group g")
	is("others' snapshots", b.dropTogether("g", ids[0], "none"), codes.InvalidArgument,
		"snapshot none is not part of group g")
	_, err = b.snapTogether("g", "v1")
	is("of other volumes", err, codes.AlreadyExists, `exists with the volumes ["v1" "v2"]`)
	_, err = b.snapTogether("h", "v1", "none")
	is("of a volume that is elsewhere", err, codes.NotFound,
		"volume none does not exist on node w1: a group of snapshots is of volumes of one node")
	_, err = b.snapTogether("h", "v1", "v1")
	is("twice", err, codes.InvalidArgument, "volume v1 is named twice")
	_, err = b.snapTogether("h")
	is("of none", err, codes.InvalidArgument, "has 1 to 64 volumes")
	must(t, errors.Join(b.dropTogether("g", ids...), b.dropTogether("g", ids...)))
	if _, err := b.groups.GetVolumeGroupSnapshot(t.Context(),
		&spec.GetVolumeGroupSnapshotRequest{GroupSnapshotId: "g"}); status.Code(err) != codes.NotFound {
		t.Errorf("a group that went: %v", err)
	}
	b.reads("of-v1", "data", "one")
	b.reads("of-v2", "data", "two")
	must(t, errors.Join(b.delete("of-v1"), b.delete("of-v2"), b.delete("v1"), b.delete("v2")))
	nothingLeft(t, b.cfg.Root)
}

// A group without enough space leaves nothing: neither its first snapshots nor its reservations.
func TestGroupWithoutRoom(t *testing.T) {
	b := newBench(t, 64*mib)
	must(t, errors.Join(b.create("v1", 20*mib), b.create("v2", 20*mib)))
	_, err := b.snapTogether("g", "v1", "v2")
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a group of 40 MiB where there are 24: %v", err)
	}
	if _, err := b.snap("s", "v1"); err != nil {
		t.Errorf("afterwards there is no room for one: %v", err)
	}
	must(t, errors.Join(b.drop("s"), b.delete("v1"), b.delete("v2")))
	nothingLeft(t, b.cfg.Root)
}

// After a driver was killed between any two steps, repeating the call completes a group, and
// deleting it leaves nothing.
func TestGroupKilledBetweenSteps(t *testing.T) {
	of := []string{"v1", "v2"}
	begin := func(b *bench, members int) {
		must(b.t, b.store.writeGroup("g", groupRecord{Volumes: of}))
		for _, v := range of[:members] {
			must(b.t, writeRecord(b.store.snapshotRecordFile(memberSnapshotID("g", v)),
				volumeRecord{Size: 20 * mib, SourceVolume: v, Group: "g", Shared: true}))
		}
	}
	ready := func(b *bench, v string) {
		must(b.t, writeRecord(b.store.snapshotRecordFile(memberSnapshotID("g", v)),
			volumeRecord{Size: 20 * mib, SourceVolume: v, Group: "g", Ready: true, CreatedAt: 1}))
	}
	for name, state := range map[string]func(b *bench){
		"before anything": func(*bench) {},
		"record begun":    func(b *bench) { begin(b, 0) },
		"one promised":    func(b *bench) { begin(b, 1) },
		"half a copy": func(b *bench) {
			begin(b, 2)
			must(b.t, os.WriteFile(b.store.snapshotFile(memberSnapshotID("g", "v1")), []byte("half"), 0o600))
		},
		"one frozen": func(b *bench) {
			begin(b, 2)
			dir, err := os.Open(b.stageAt("v2"))
			must(b.t, err)
			defer dir.Close()
			var none int32
			must(b.t, ioctlPointer(dir, ioctlFreeze, &none))
		},
		"one said to be ready": func(b *bench) { begin(b, 2); ready(b, "v1") },
		"all but the group":    func(b *bench) { begin(b, 2); ready(b, "v1"); ready(b, "v2") },
		"half deleted": func(b *bench) {
			_, err := b.snapTogether("g", of...)
			must(b.t, errors.Join(err, b.store.writeGroup("g", groupRecord{Volumes: of}),
				b.store.removeSnapshot(memberSnapshotID("g", "v1"))))
		},
		"taken": func(b *bench) { _, err := b.snapTogether("g", of...); must(b.t, err) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 0)
			for _, v := range of {
				must(t, b.create(v, 20*mib))
				b.write(v, "data", v)
			}
			state(b)
			b.again(0)
			must(t, b.thawAll())
			if name == "one frozen" {
				wrote := make(chan error, 1)
				go func() { wrote <- os.WriteFile(filepath.Join(b.dir, "staged-v2", "more"), nil, 0o600) }()
				must(t, <-wrote)
				b.unstageAt("v2")
			}
			g, err := b.snapTogether("g", of...)
			must(t, err)
			for _, s := range g.Snapshots {
				id := "of-" + s.SourceVolumeId
				_, err = b.createOf(id, 20*mib, ofSnapshot(s.SnapshotId))
				must(t, err)
				b.reads(id, "data", s.SourceVolumeId)
				if out, err := exec.Command("e2fsck", "-f", "-n", b.store.imageFile(id)).CombinedOutput(); err != nil {
					t.Errorf("the file system: %v\n%s", err, out)
				}
			}
			b.again(0)
			must(t, errors.Join(b.dropTogether("g"), b.delete("of-v1"), b.delete("of-v2"), b.delete("v1"),
				b.delete("v2")))
			nothingLeft(t, b.cfg.Root)
		})
	}
}
