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

func TestParsePlace(t *testing.T) {
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
		"":                                         {otherPrefixes, "", ""},
		"/else/where":                              {otherPrefixes, "", ""},
	} {
		place, group, resource := parseKeyPrefix(key, known)
		if got := [3]string{place, group, resource}; got != want {
			t.Errorf("the place of %q is %q, want %q", key, got, want)
		}
	}
}

// FuzzInspectBackup checks that describing any file causes no panic, and that its result is bounded
// by the file.
func FuzzInspectBackup(f *testing.F) {
	var good bytes.Buffer
	if err := writeBackupOf(&good, map[string]string{"/registry/pods/default/a": "x", "/registry/a.b/c/d": "y",
		"/registry/keelson.dev/feature-level": `{"level":1}`}); err != nil {
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
		if n != info.Keys || len(b.Kinds) > maxKeyPrefixes+1 {
			t.Errorf("%d objects of %d kinds, want the %d keys of the file", n, len(b.Kinds), info.Keys)
		}
	})
}

// The number of key prefixes is bounded. Objects of further key prefixes are counted together.
func TestManyPlaces(t *testing.T) {
	state := map[string]string{}
	for i := range maxKeyPrefixes + 50 {
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
	if len(b.Kinds) != maxKeyPrefixes+1 || n != len(state) {
		t.Errorf("%d places with %d objects, want %d with %d", len(b.Kinds), n, maxKeyPrefixes+1, len(state))
	}
}

// writeBackupOf writes an unencrypted backup of a state.
func writeBackupOf(w io.Writer, state map[string]string) error {
	m := mvcc.New()
	for key, value := range state {
		p, err := mvcc.Proposal(raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte(value))}})
		if err != nil {
			return err
		}
		m.Apply(mvcc.Entry{Term: 1,
			Command: &storev1.Command{
				Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{p}}}}})
	}
	return disk.WriteClearBackup(w, "ours", time.Now(), m.View())
}
