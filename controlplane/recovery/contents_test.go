package recovery

import (
	"bytes"
	"fmt"
	"io"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

func TestPlaces(t *testing.T) {
	known := map[string]*api.Kind{}
	for _, k := range BuiltInKinds() {
		if k.Storage != nil {
			known[k.Storage.Prefix] = k
		}
	}
	for key, want := range map[string][3]string{
		"/registry/pods/default/a":                 {"/registry/pods/", "", "pods"},
		"/registry/namespaces/a":                   {"/registry/namespaces/", "", "namespaces"},
		"/registry/deployments/default/a":          {"/registry/deployments/", "apps", "deployments"},
		"/registry/shop.example/orders/default/a":  {"/registry/shop.example/orders/", "shop.example", "orders"},
		"/registry/shop.example/orders/a":          {"/registry/shop.example/orders/", "shop.example", "orders"},
		"/registry/keelson.dev/feature-level":      {"/registry/keelson.dev/", "", ""},
		"/registry/keelson.dev/reservations/ip/10": {"/registry/keelson.dev/", "", ""},
		"/registry/unheard/of/it":                  {"/registry/unheard/", "", ""},
		"/registry/":                               {"/registry//", "", ""},
		"":                                         {elsewhere, "", ""},
		"/else/where":                              {elsewhere, "", ""},
	} {
		place, group, resource := placeOf(key, known)
		if got := [3]string{place, group, resource}; got != want {
			t.Errorf("%q lies at %q, want %q", key, got, want)
		}
	}
}

// FuzzInspectBackup: whatever a file holds, saying what is in it takes no more room than the file has, and no panic.
func FuzzInspectBackup(f *testing.F) {
	var good bytes.Buffer
	if err := writeBackupOf(&good, map[string]string{"/registry/pods/default/a": "x", "/registry/a.b/c/d": "y", "/registry/keelson.dev/feature-level": `{"level":1}`}); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add(good.Bytes()[:40])
	all := BuiltInKinds()
	f.Fuzz(func(t *testing.T, content []byte) {
		info, v, err := disk.ReadBackup(bytes.NewReader(content), nil)
		if err != nil {
			return
		}
		b := DescribeBackup(info, v, all)
		n := 0
		for _, k := range b.Kinds {
			n += k.Objects
		}
		if n != info.Keys || len(b.Kinds) > mostPlaces+1 {
			t.Errorf("%d objects of %d kinds, the file tells of %d keys", n, len(b.Kinds), info.Keys)
		}
	})
}

// The places that a file may make up are bounded, and what is beyond is counted all the same.
func TestManyPlaces(t *testing.T) {
	state := map[string]string{}
	for i := range mostPlaces + 50 {
		state[fmt.Sprintf("/registry/g%d.example/things/n", i)] = "v"
	}
	var file bytes.Buffer
	if err := writeBackupOf(&file, state); err != nil {
		t.Fatal(err)
	}
	info, v, err := disk.ReadBackup(&file, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := DescribeBackup(info, v, BuiltInKinds())
	n := 0
	for _, k := range b.Kinds {
		n += k.Objects
	}
	if len(b.Kinds) != mostPlaces+1 || n != len(state) {
		t.Errorf("%d places with %d objects, want %d with %d", len(b.Kinds), n, mostPlaces+1, len(state))
	}
}

// writeBackupOf writes a backup in clear that holds a state.
func writeBackupOf(w io.Writer, state map[string]string) error {
	m := mvcc.New()
	for key, value := range state {
		p, err := mvcc.Proposal(raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte(value))}})
		if err != nil {
			return err
		}
		m.Apply(mvcc.Entry{Term: 1, Command: &storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{p}}}}})
	}
	return disk.WriteClearBackup(w, "ours", time.Now(), m.View())
}
