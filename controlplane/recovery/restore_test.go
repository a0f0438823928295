package recovery

import (
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// A replica that requests membership, or has not caught up yet, is joining after a restart. After a
// recovery or restore it is not.
func TestIsJoining(t *testing.T) {
	for _, name := range []string{datadir.PeersFile, datadir.NewMemberFile} {
		d := datadir.Dir{Name: "cp1", Path: t.TempDir()}
		checkJoining := func(want bool) {
			t.Helper()
			if got, err := d.IsJoining(); err != nil || got != want {
				t.Errorf("%s: IsJoining returned %v, %v", name, got, err)
			}
		}
		checkJoining(false)
		if err := datadir.WriteJSON(filepath.Join(d.Path, name), map[string]string{"cp2": "127.0.0.12:6445"}); err !=
			nil {
			t.Fatal(err)
		}
		checkJoining(true)
		if err := recordSoleMember(d, replica.Config{Network: replica.Network{Advertise: "127.0.0.11:6445"}}); err !=
			nil {
			t.Fatal(err)
		}
		checkJoining(false)
	}
}

// A Node that cannot be decoded does not prevent a restore. Other Nodes are marked, and this Node
// is not changed.
func TestVolumeResetSkipsUnreadableNodes(t *testing.T) {
	form := storedform.NewForm(kinds.All().ByType(&v1.Node{}).Storage)
	good, err := form.Encode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	if err != nil {
		t.Fatal(err)
	}
	m := mvcc.New()
	m.Amend(raftstore.Put(form.Key("", "w1"), good), raftstore.Put(form.Key("", "w2"), []byte("cut short")))
	ops, err := volumeResetOps(m.View())
	if err != nil || len(ops) != 1 || ops[0].Key != form.Key("", "w1") {
		t.Errorf("changed: %+v, error %v", ops, err)
	}
}
