package server_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// F52: a backup that is encrypted with age can be restored with the identity alone, without any key
// of the cluster. If it cannot be decrypted, the restore is refused and changes nothing.
func TestRestoreFromAge(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
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
	requestBackup := func(of ...string) ([]byte, error) {
		return p.Client("cp1").RESTClient().Post().RequestURI(api.PathClusterBackup + "?" +
			url.Values{"recipient": of}.Encode()).Do(context.Background()).Raw()
	}
	raw, err := requestBackup(recipient)
	if err = errors.Join(err, os.WriteFile(file, raw, 0o600)); err != nil {
		t.Fatal(err)
	}
	postError := func(query string, body []byte) error {
		return p.Client("cp1").RESTClient().Post().RequestURI(query).Body(body).Do(context.Background()).Error()
	}
	if err := postError(api.PathClusterBackup+"?recipient=bob", nil); err == nil ||
		!strings.Contains(err.Error(), "want recipients of age") {
		t.Errorf("an invalid recipient: %v", err)
	}
	if err := postError(api.PathClusterVerify, raw); err == nil || !strings.Contains(err.Error(), "--identity") {
		t.Errorf("verifying the backup on a replica: %v", err)
	}
	b, err := recovery.InspectBackup(datadir.StoreOptions{}, file)
	if !errors.Is(err, backups.ErrNeedsIdentity) || b.Cluster != "" || !b.Sealed ||
		!slices.Equal(b.Recipients, []string{"X25519"}) {
		t.Errorf("description without an identity: %+v, %v", b, err)
	}
	if b, err = recovery.InspectBackup(datadir.StoreOptions{Identity: id}, file); err != nil || b.Cluster == "" ||
		len(b.Kinds) == 0 || b.KeyID != "" {
		t.Errorf("description with the identity: %+v, %v", b, err)
	}

	p.StopReplica("cp1")
	fresh := server.Config{Name: "cp1", DataDir: filepath.Join(p.Dir, "empty"), Advertise: servertest.Address(1),
		Process: server.ProcessConfig{Version: "test"}}
	if p.Founded, err = server.Init(fresh, p.Cluster, server.InitOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string]recovery.RestoreOptions{
		"no identity":        {AnyCluster: true},
		"another identity":   {AnyCluster: true, Identity: other},
		"of another cluster": {Identity: id},
	} {
		if _, err := recovery.Restore(fresh.Dir(), file, o); err == nil {
			t.Errorf("%s: the restore was not refused", what)
		}
		if _, err := os.Stat(filepath.Join(fresh.DataDir, datadir.RaftFolder)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the refused restore changed the disk: %v", what, err)
		}
	}
	if _, err := recovery.Restore(fresh.Dir(), file, recovery.RestoreOptions{AnyCluster: true, Identity: id}); err !=
		nil {
		t.Fatal(err)
	}
	p.StartReplica(fresh)
	p.AwaitReady("cp1")
	p.CheckConfigMaps("cp1", "a")
}
