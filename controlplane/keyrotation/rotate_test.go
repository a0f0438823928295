package keyrotation_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// traffic is a load of writes and watches through every replica. Its function end stops the load
// and returns the errors.
type traffic struct {
	end func() error
}

func (p *plane) startTraffic(t *testing.T) *traffic {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	var mu sync.Mutex
	var failed []error
	fail := func(err error) {
		if ctx.Err() != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		failed = append(failed, err)
	}
	for name := range p.Members {
		cs := p.Client(name)
		all.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "load-"}}
				if _, err := cs.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
					fail(fmt.Errorf("write %d through %s: %w", i, name, err))
					return
				}
			}
		})
		timeout := int64(600)
		long := p.RESTConfig(name)
		long.Timeout = 0
		w, err := servertest.NewClient(t, long).CoreV1().ConfigMaps("default").Watch(ctx,
			metav1.ListOptions{TimeoutSeconds: &timeout})
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			for range w.ResultChan() {
			}
			fail(fmt.Errorf("the watch at %s ended", name))
		})
	}
	return &traffic{end: func() error {
		cancel()
		all.Wait()
		return errors.Join(failed...)
	}}
}

func (p *plane) awaitRotation(t *testing.T, at string, kind rotation.Kind) *api.ClusterRotation {
	t.Helper()
	var last *api.ClusterRotation
	servertest.Eventually(t, func() error {
		all := p.Keys(at)
		if last = all.Rotation; last == nil || last.Kind != string(kind) || last.Step != string(rotation.Done) {
			return fmt.Errorf("%+v, waiting for %q", last, all.Waiting)
		}
		for _, h := range all.Replicas {
			for _, k := range h.Keys {
				if k.Kind == string(kind) && (k.Signs != last.New || len(k.Believes) != 1) {
					return fmt.Errorf("%s has %+v", h.Name, k)
				}
			}
		}
		return nil
	})
	return last
}

// authenticateWithToken returns an error if a replica rejects a token.
func (p *plane) authenticateWithToken(name, token string) error {
	cfg := rest.AnonymousClientConfig(p.RESTConfig(name))
	cfg.BearerToken = token
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	resp, err := client.Get(cfg.Host + "/api/v1/namespaces/default")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		return errors.New(resp.Status)
	}
	return nil
}

// accountTokens has tokens of one service account that were signed with the same key.
type accountTokens struct{ requested, inSecret string }

// requestToken requests a token of the default service account from a replica.
func (p *plane) requestToken(t *testing.T, at string) string {
	t.Helper()
	var text string
	servertest.Eventually(t, func() error {
		got, err := p.Client(at).CoreV1().ServiceAccounts("default").CreateToken(context.Background(), "default",
			&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err == nil {
			text = got.Status.Token
		}
		return err
	})
	return text
}

// createTokenSecret creates Secret default/kept for a token of the default service account. It
// waits for the account first, because the token controller deletes Secrets of accounts that do not
// exist.
func (p *plane) createTokenSecret(t *testing.T) {
	t.Helper()
	servertest.Eventually(t, func() error {
		_, err := p.Client("cp1").CoreV1().ServiceAccounts("default").Get(context.Background(), "default",
			metav1.GetOptions{})
		return err
	})
	s := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "kept",
		Annotations: map[string]string{v1.ServiceAccountNameKey: "default"}},
		Type: v1.SecretTypeServiceAccountToken}
	if _, err := p.Client("cp1").CoreV1().Secrets("default").Create(context.Background(), s,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// readTokenSecret returns the current token in Secret default/kept.
func (p *plane) readTokenSecret(t *testing.T) (text string) {
	t.Helper()
	servertest.Eventually(t, func() error {
		s, err := p.Client("cp1").CoreV1().Secrets("default").Get(context.Background(), "kept", metav1.GetOptions{})
		if err == nil && len(s.Data[v1.ServiceAccountTokenKey]) == 0 {
			err = errors.New("the Secret has no token yet")
		}
		if err == nil {
			text = string(s.Data[v1.ServiceAccountTokenKey])
		}
		return err
	})
	return text
}

// checkTokens checks that every replica accepts the tokens, or that none does.
func (p *plane) checkTokens(t *testing.T, want bool, of ...accountTokens) {
	t.Helper()
	for name := range p.Members {
		for _, b := range of {
			for what, text := range map[string]string{"requested": b.requested, "in the Secret": b.inSecret} {
				if err := p.authenticateWithToken(name, text); text != "" && (err == nil) != want {
					t.Errorf("token %s of key %s at %s: %v", what, pki.ParseKeyID(text), name, err)
				}
			}
		}
	}
}

// checkPublishedKeys checks that every replica publishes the keys of the tokens.
func (p *plane) checkPublishedKeys(t *testing.T, tokens ...string) {
	t.Helper()
	for name := range p.Members {
		var jwks string
		err := p.Call(name, "GET", "/openid/v1/jwks", nil, &jwks)
		for _, text := range tokens {
			if err != nil || !strings.Contains(jwks, pki.ParseKeyID(text)) {
				t.Errorf("the keys that %s publishes: %s, %v", name, jwks, err)
			}
		}
	}
}

// checkRotationRefused checks that a request is refused with an error that contains words.
func (p *plane) checkRotationRefused(t *testing.T, q api.ClusterRotate, words string) {
	t.Helper()
	if err := p.Call("cp1", "POST", api.PathClusterKeys, q, nil); err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%+v: %v, want %q", q, err, words)
	}
}

// Each shared key except the cluster CA is rotated while three replicas serve writes and watches.
// No request fails and no watch ends. Tokens of the previous service account key are valid until
// the end of the rotation. A restarted replica and a new replica have the new keys.
// TestClusterCARotates tests the cluster CA. F51
func TestKeysRotate(t *testing.T) {
	p := newPlane(t, 3, nil)
	old := accountTokens{requested: p.requestToken(t, "cp1")}
	p.createTokenSecret(t)
	old.inSecret = p.readTokenSecret(t)
	before := p.Backup("cp1")
	work := p.startTraffic(t)
	former := p.readDataKeys(t)
	for _, kind := range []rotation.Kind{rotation.PeersCA, rotation.EncryptionKey} {
		p.requestRotation(t, "cp2", api.ClusterRotate{Kind: string(kind)})
		p.awaitRotation(t, "cp3", kind)
	}
	for name, keys := range p.readDataKeys(t) {
		if slices.ContainsFunc(keys, func(n uint32) bool { return slices.Contains(former[name], n) }) {
			t.Errorf("%s has the data keys %v, and had %v before the rotation", name, keys, former[name])
		}
	}

	// The rotation of the service account key stays in the step wait, in which both keys are
	// accepted, until it is forced.
	p.requestRotation(t, "cp2", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)})
	p.awaitStep(t, "cp1", rotation.Wait, "Secret default/kept")
	p.checkRotationRefused(t, api.ClusterRotate{Kind: string(rotation.PeersCA)}, "only one rotation can run")
	p.checkRotationRefused(t, api.ClusterRotate{Abort: true}, "already in use")
	current := accountTokens{requested: p.requestToken(t, "cp3")}
	if pki.ParseKeyID(current.requested) == pki.ParseKeyID(old.requested) {
		t.Error("a new token is signed with the previous key")
	}
	p.checkPublishedKeys(t, old.requested, current.requested)
	p.checkTokens(t, true, old, current)
	p.requestRotation(t, "cp3", api.ClusterRotate{Force: true})
	p.awaitRotation(t, "cp1", rotation.ServiceAccountKey)
	if err := work.end(); err != nil {
		t.Errorf("during the rotation: %v", err)
	}
	current.inSecret = p.readTokenSecret(t)
	p.checkTokens(t, false, old)
	p.checkTokens(t, true, current)

	p.StopReplica("cp2")
	p.Restart("cp2")
	late := p.NewConfig(4)
	p.Join(late)
	p.StartReplica(late)
	p.AwaitReady("cp4")
	p.checkTokens(t, true, current)
	for name := range p.Members {
		p.checkTrustFiles(t, name, name != "cp4")
		p.checkBackupKey(t, name, before, name != "cp4")
	}
}

// readDataKeys returns the numbers of the data keys on each replica's disk.
func (p *plane) readDataKeys(t *testing.T) map[string][]uint32 {
	t.Helper()
	out := make(map[string][]uint32)
	for name, m := range p.Members {
		b, err := os.ReadFile(filepath.Join(m.Config.DataDir, datadir.RaftFolder, "raft.keys"))
		if err != nil || len(b) < 9 {
			t.Fatalf("data keys of %s: %d bytes, %v", name, len(b), err)
		}
		for b = b[9:]; len(b) > 0; { // after the checksum, the version and the next number
			out[name] = append(out[name], binary.LittleEndian.Uint32(b))
			b = b[4:]
			for range 2 { // the ID of the wrapping key, and the encrypted data key
				b = b[1+int(b[0]):]
			}
		}
	}
	return out
}

// checkBackupKey checks whether the key file of a replica can decrypt a backup that was made before
// the rotation. Replicas that had the previous key keep it for backups.
func (p *plane) checkBackupKey(t *testing.T, name, backup string, may bool) {
	t.Helper()
	cfg := p.Members[name].Config
	b, err := recovery.InspectBackup(datadir.StoreOptions{Keys: datadir.KeyFile(cfg.DataDir)}, backup)
	if may && (err != nil || len(b.Kinds) == 0) || !may && !errors.Is(err, disk.ErrSealed) {
		t.Errorf("a backup from before the rotation, at %s: %d kinds, %v", name, len(b.Kinds), err)
	}
	store, err := cfg.Dir().StoreConfig(p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	ring, err := recovery.BackupKeyring(cfg.Dir(), p.Cluster, "")
	if err != nil || ring.Current() != store.Storage.Keys.Current() || slices.Contains(ring.IDs(), b.KeyID) != may {
		t.Errorf("%s would restore with the keys %v, current %s, %v; the backup's is %s", name, ring.IDs(),
			ring.Current(), err, b.KeyID)
	}
}

// checkTrustFiles checks the modes of the trust files of a replica, and whether the file of
// previous store keys exists.
func (p *plane) checkTrustFiles(t *testing.T, name string, former bool) {
	t.Helper()
	folder := recovery.TrustFolder(p.Members[name].Config.Dir())
	files, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	has := false
	for _, f := range files {
		if info, err := f.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s of %s has mode %v, %v", f.Name(), name, info.Mode(), err)
		}
		has = has || f.Name() == datadir.FormerKeysFile
	}
	if has != former {
		t.Errorf("the file of previous keys at %s exists: %v, want %v", name, has, former)
	}
}

// The leader stops at every step of a rotation, and another leader continues it. A replica that
// does not respond blocks the start of a rotation, and is named. F51
func TestLeadersDieWhileKeysRotate(t *testing.T) {
	p := newPlane(t, 3, nil)
	leader := func() (name string) {
		t.Helper()
		servertest.Eventually(t, func() error {
			for n := range p.Members {
				var s api.ClusterStatus
				if err := p.Call(n, "GET", api.PathClusterStatus, nil, &s); err == nil && s.Leader != "" {
					name = s.Leader
					return nil
				}
			}
			return errors.New("nobody leads")
		})
		return name
	}
	other := func(than string) string {
		for n := range p.Members {
			if n != than {
				return n
			}
		}
		return ""
	}
	away := other(leader())
	at := other(away)
	before := p.Keys(at).Replicas
	p.StopReplica(away)
	if err := p.Call(at, "POST", api.PathClusterKeys, api.ClusterRotate{Kind: "peers-ca"}, nil); err == nil ||
		!strings.Contains(err.Error(), away+": it does not answer") {
		t.Errorf("a rotation without %s: %v", away, err)
	}
	p.Restart(away)
	post := func(at string, q api.ClusterRotate) {
		t.Helper()
		servertest.Eventually(t, func() error { return p.Call(at, "POST", api.PathClusterKeys, q, nil) })
	}
	for _, q := range []api.ClusterRotate{{Kind: "peers-ca"}, {Kind: "cluster-ca", Keep: "0s"}} {
		post(at, q)
		for range 3 { // the rotation may be at any step
			l := leader()
			p.StopReplica(l)
			p.Restart(l)
		}
		p.awaitRotation(t, at, rotation.Kind(q.Kind))
	}
	for i, k := range p.Keys(at).Replicas[0].Keys {
		if exchanged := k.Signs != before[0].Keys[i].Signs; exchanged != strings.HasSuffix(k.Kind, "-ca") {
			t.Errorf("%s: key %s before, %s now", k.Kind, before[0].Keys[i].Signs, k.Signs)
		}
	}
	p.PutConfigMap(away, "after")
	for n := range p.Members {
		servertest.Eventually(t, func() error {
			_, err := p.Client(n).CoreV1().ConfigMaps("default").Get(context.Background(), "after", metav1.GetOptions{})
			return err
		})
	}
}
