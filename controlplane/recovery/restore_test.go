package recovery

import (
	"path/filepath"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica"
)

// Who is to become a member, or was taken in and has not all that the group has, knows it at its next start; one whose group was
// recovered or restored has nobody to wait for.
func TestNewcomersRemember(t *testing.T) {
	for _, name := range []string{datadir.PeersFile, datadir.NewcomerFile} {
		d := datadir.Dir{Name: "cp1", Path: t.TempDir()}
		joins := func(want bool) {
			t.Helper()
			if got, err := d.IsJoining(); err != nil || got != want {
				t.Errorf("%s: it joins: %v, %v", name, got, err)
			}
		}
		joins(false)
		if err := datadir.WriteJSON(filepath.Join(d.Path, name), map[string]string{"cp2": "127.0.0.12:6445"}); err != nil {
			t.Fatal(err)
		}
		joins(true)
		if err := recordAlone(d, replica.Config{Advertise: "127.0.0.11:6445"}); err != nil {
			t.Fatal(err)
		}
		joins(false)
	}
}

// A Node that cannot be read keeps no store from being restored: the others are marked, and it stays as it is.
func TestUnreadableNodesOfARestore(t *testing.T) {
	form := registry.FormOf(kinds.All().ByType(&v1.Node{}).Storage)
	good, err := form.Encode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}})
	if err != nil {
		t.Fatal(err)
	}
	m := mvcc.New()
	m.Amend(raftstore.Put(form.Key("", "w1"), good), raftstore.Put(form.Key("", "w2"), []byte("cut short")))
	ops, err := unheard(m.View())
	if err != nil || len(ops) != 1 || ops[0].Key != form.Key("", "w1") {
		t.Errorf("changed: %+v, error %v", ops, err)
	}
}
