package server

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"filippo.io/age"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/recovery/backups"
)

// F52: a backup that a person has sealed by age opens with the identity alone, without any key of the cluster, and becomes a
// cluster again; what cannot be opened is refused before anything changes.
func TestRestoreFromAge(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	identity := func() (string, string) {
		id, err := age.GenerateX25519Identity()
		path := filepath.Join(t.TempDir(), "id")
		if err = errors.Join(err, os.WriteFile(path, []byte(id.String()+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path, id.Recipient().String()
	}
	id, recipient := identity()
	other, _ := identity()
	file := filepath.Join(t.TempDir(), "backup")
	ask := func(of ...string) ([]byte, error) {
		return p.client("cp1").RESTClient().Post().RequestURI(api.PathClusterBackup + "?" + url.Values{"recipient": of}.Encode()).Do(context.Background()).Raw()
	}
	raw, err := ask(recipient)
	if err = errors.Join(err, os.WriteFile(file, raw, 0o600)); err != nil {
		t.Fatal(err)
	}
	refused := func(query string, body []byte) error {
		return p.client("cp1").RESTClient().Post().RequestURI(query).Body(body).Do(context.Background()).Error()
	}
	if err := refused(api.PathClusterBackup+"?recipient=bob", nil); err == nil || !strings.Contains(err.Error(), "want recipients of age") {
		t.Errorf("of a recipient that is none: %v", err)
	}
	if err := refused(api.PathClusterVerify, raw); err == nil || !strings.Contains(err.Error(), "--identity") {
		t.Errorf("a replica that is to verify it: %v", err)
	}
	b, err := recovery.InspectBackup(datadir.StoreOptions{}, file)
	if !errors.Is(err, backups.ErrNeedsIdentity) || b.Cluster != "" || !b.Sealed || !slices.Equal(b.Recipients, []string{"X25519"}) {
		t.Errorf("without an identity it is said to be %+v, %v", b, err)
	}
	if b, err = recovery.InspectBackup(datadir.StoreOptions{Identity: id}, file); err != nil || b.Cluster == "" || len(b.Kinds) == 0 || b.KeyID != "" {
		t.Errorf("with its identity it is said to be %+v, %v", b, err)
	}

	p.stop("cp1")
	fresh := Config{Name: "cp1", DataDir: filepath.Join(p.dir, "anew"), Advertise: address(1), Version: "test"}
	if p.founded, err = Init(fresh, p.cluster, Founding{}); err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string]recovery.RestoreOptions{
		"no identity":        {AnyCluster: true},
		"another identity":   {AnyCluster: true, Identity: other},
		"of another cluster": {Identity: id},
	} {
		if _, err := recovery.Restore(fresh.Dir(), file, o); err == nil {
			t.Errorf("%s: it is restored", what)
		}
		if _, err := os.Stat(filepath.Join(fresh.DataDir, datadir.RaftFolder)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a refused restore has changed the disk: %v", what, err)
		}
	}
	if _, err := recovery.Restore(fresh.Dir(), file, recovery.RestoreOptions{AnyCluster: true, Identity: id}); err != nil {
		t.Fatal(err)
	}
	p.start(fresh)
	p.ready("cp1")
	p.holds("cp1", "a")
}
