package server

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
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/raftstore/disk"
)

// traffic writes and watches through every replica that is not spared, until end, and says what failed.
type traffic struct {
	end func() error
}

func (p *plane) traffic(t *testing.T) *traffic {
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
	for name := range p.members {
		cs := p.client(name)
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
		long := p.rest(name)
		long.Timeout = 0
		w, err := mustClient(t, long).CoreV1().ConfigMaps("default").Watch(ctx, metav1.ListOptions{TimeoutSeconds: &timeout})
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

func (p *plane) keys(name string) (out api.ClusterKeys) {
	p.t.Helper()
	if err := p.call(name, "GET", api.PathClusterKeys, nil, &out); err != nil {
		p.t.Fatal(err)
	}
	return out
}

func (p *plane) rotated(t *testing.T, at string, kind rotation.Kind) *api.ClusterRotation {
	t.Helper()
	var last *api.ClusterRotation
	eventually(t, func() error {
		all := p.keys(at)
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

// asToken asks who the bearer of a token is.
func (p *plane) asToken(name, token string) error {
	cfg := rest.AnonymousClientConfig(p.rest(name))
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

// bearer are tokens of an account, by the key of a time.
type bearer struct{ asked, secret string }

// asked is a token of the default account that a replica has signed.
func (p *plane) asked(t *testing.T, at string) string {
	t.Helper()
	var text string
	eventually(t, func() error {
		got, err := p.client(at).CoreV1().ServiceAccounts("default").CreateToken(context.Background(), "default",
			&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err == nil {
			text = got.Status.Token
		}
		return err
	})
	return text
}

// kept makes Secret default/kept for a token of the default account.
func (p *plane) kept(t *testing.T) {
	t.Helper()
	s := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "kept", Annotations: map[string]string{v1.ServiceAccountNameKey: "default"}},
		Type: v1.SecretTypeServiceAccountToken}
	if _, err := p.client("cp1").CoreV1().Secrets("default").Create(context.Background(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// ofSecret is the token of Secret default/kept as it is now.
func (p *plane) ofSecret(t *testing.T) (text string) {
	t.Helper()
	eventually(t, func() error {
		s, err := p.client("cp1").CoreV1().Secrets("default").Get(context.Background(), "kept", metav1.GetOptions{})
		if err == nil && len(s.Data[v1.ServiceAccountTokenKey]) == 0 {
			err = errors.New("it has no token yet")
		}
		if err == nil {
			text = string(s.Data[v1.ServiceAccountTokenKey])
		}
		return err
	})
	return text
}

// believed checks at every replica which tokens are good.
func (p *plane) believed(t *testing.T, want bool, of ...bearer) {
	t.Helper()
	for name := range p.members {
		for _, b := range of {
			for what, text := range map[string]string{"asked for": b.asked, "of the Secret": b.secret} {
				if err := p.asToken(name, text); text != "" && (err == nil) != want {
					t.Errorf("a token %s of key %s at %s: %v", what, pki.KeyIDOf(text), name, err)
				}
			}
		}
	}
}

// published checks that every replica tells of the keys of both tokens.
func (p *plane) published(t *testing.T, tokens ...string) {
	t.Helper()
	for name := range p.members {
		var jwks string
		err := p.call(name, "GET", "/openid/v1/jwks", nil, &jwks)
		for _, text := range tokens {
			if err != nil || !strings.Contains(jwks, pki.KeyIDOf(text)) {
				t.Errorf("the keys that %s publishes: %s, %v", name, jwks, err)
			}
		}
	}
}

// refusesRotation checks that a request is refused in these words.
func (p *plane) refusesRotation(t *testing.T, q api.ClusterRotate, words string) {
	t.Helper()
	if err := p.call("cp1", "POST", api.PathClusterKeys, q, nil); err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("%+v: %v, want %q", q, err, words)
	}
}

// Each key that replicas share is exchanged while three replicas serve a load of writes and watches: no call fails, no
// watch ends; what the former service account key signed is good until the end and no longer; a replica that starts
// again, and one that joins afterwards, take part. The CA: TestClusterCARotates. F51
func TestKeysRotate(t *testing.T) {
	p := newPlane(t, 3, nil)
	old := bearer{asked: p.asked(t, "cp1")}
	p.kept(t)
	old.secret = p.ofSecret(t)
	before := p.backup("cp1")
	work := p.traffic(t)
	former := p.dataKeys(t)
	for _, kind := range []rotation.Kind{rotation.PeersCA, rotation.EncryptionKey} {
		p.begins(t, "cp2", api.ClusterRotate{Kind: string(kind)})
		p.rotated(t, "cp3", kind)
	}
	for name, keys := range p.dataKeys(t) {
		if slices.ContainsFunc(keys, func(n uint32) bool { return slices.Contains(former[name], n) }) {
			t.Errorf("%s has the data keys %v, and before the exchange it had %v", name, keys, former[name])
		}
	}

	// The service account key stays at the step in which both are believed, until it is told not to wait.
	p.begins(t, "cp2", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)})
	p.waitsFor(t, "cp1", rotation.Wait, "Secret default/kept")
	p.refusesRotation(t, api.ClusterRotate{Kind: string(rotation.PeersCA)}, "only one at a time")
	p.refusesRotation(t, api.ClusterRotate{Abort: true}, "in use already")
	young := bearer{asked: p.asked(t, "cp3")}
	if pki.KeyIDOf(young.asked) == pki.KeyIDOf(old.asked) {
		t.Error("a new token is signed with the former key")
	}
	p.published(t, old.asked, young.asked)
	p.believed(t, true, old, young)
	p.begins(t, "cp3", api.ClusterRotate{Force: true})
	p.rotated(t, "cp1", rotation.ServiceAccountKey)
	if err := work.end(); err != nil {
		t.Errorf("during the exchange: %v", err)
	}
	young.secret = p.ofSecret(t)
	p.believed(t, false, old)
	p.believed(t, true, young)

	p.stop("cp2")
	p.again("cp2")
	late := p.config(4)
	p.join(late)
	p.start(late)
	p.ready("cp4")
	p.believed(t, true, young)
	for name := range p.members {
		p.keepsSecret(t, name, name != "cp4")
		p.opens(t, name, before, name != "cp4")
	}
}

// dataKeys are the numbers of the data keys that lie on the replicas' disks.
func (p *plane) dataKeys(t *testing.T) map[string][]uint32 {
	t.Helper()
	out := make(map[string][]uint32)
	for name, m := range p.members {
		b, err := os.ReadFile(filepath.Join(m.cfg.DataDir, datadir.RaftFolder, "raft.keys"))
		if err != nil || len(b) < 9 {
			t.Fatalf("data keys of %s: %d bytes, %v", name, len(b), err)
		}
		for b = b[9:]; len(b) > 0; { // behind checksum, version and the next number
			out[name] = append(out[name], binary.LittleEndian.Uint32(b))
			b = b[4:]
			for range 2 { // the id of the key it is wrapped under, and the sealed bytes
				b = b[1+int(b[0]):]
			}
		}
	}
	return out
}

// opens: who has had the key under which a backup is sealed opens it, although the key has been exchanged, with the key file of now.
func (p *plane) opens(t *testing.T, name, backup string, may bool) {
	t.Helper()
	cfg := p.members[name].cfg
	b, err := recovery.InspectBackup(datadir.StoreOptions{Keys: datadir.KeyFile(cfg.DataDir)}, backup)
	if may && (err != nil || len(b.Kinds) == 0) || !may && !errors.Is(err, disk.ErrSealed) {
		t.Errorf("a backup of before the exchange, at %s: %d kinds, %v", name, len(b.Kinds), err)
	}
	store, err := cfg.Dir().StoreConfig(p.cluster)
	if err != nil {
		t.Fatal(err)
	}
	ring, err := recovery.BackupKeyring(cfg.Dir(), p.cluster, "")
	if err != nil || ring.Current() != store.Keys.Current() || slices.Contains(ring.IDs(), b.KeyID) != may {
		t.Errorf("%s would restore with the keys %v, current %s, %v; the backup's is %s", name, ring.IDs(), ring.Current(), err, b.KeyID)
	}
}

// keepsSecret checks the files of a replica's trust: their modes, and whether the key of former backups is among them.
func (p *plane) keepsSecret(t *testing.T, name string, former bool) {
	t.Helper()
	folder := recovery.TrustFolder(p.members[name].cfg.Dir())
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
		t.Errorf("the key of former backups at %s: %v, want %v", name, has, former)
	}
}

// The leader dies at every step of an exchange, and another one goes on. A replica that is away holds it up, by name,
// and it may be given up before the new key is used; then nothing has changed. F51
func TestLeadersDieWhileKeysRotate(t *testing.T) {
	p := newPlane(t, 3, nil)
	leader := func() (name string) {
		t.Helper()
		eventually(t, func() error {
			for n := range p.members {
				var s api.ClusterStatus
				if err := p.call(n, "GET", api.PathClusterStatus, nil, &s); err == nil && s.Leader != "" {
					name = s.Leader
					return nil
				}
			}
			return errors.New("nobody leads")
		})
		return name
	}
	other := func(than string) string {
		for n := range p.members {
			if n != than {
				return n
			}
		}
		return ""
	}
	away := other(leader())
	at := other(away)
	before := p.keys(at).Replicas
	p.stop(away)
	if err := p.call(at, "POST", api.PathClusterKeys, api.ClusterRotate{Kind: "peers-ca"}, nil); err == nil || !strings.Contains(err.Error(), away+": it does not answer") {
		t.Errorf("an exchange without %s: %v", away, err)
	}
	p.again(away)
	post := func(at string, q api.ClusterRotate) {
		t.Helper()
		eventually(t, func() error { return p.call(at, "POST", api.PathClusterKeys, q, nil) })
	}
	for _, q := range []api.ClusterRotate{{Kind: "peers-ca"}, {Kind: "cluster-ca", Keep: "0s"}} {
		post(at, q)
		for range 3 { // whatever step it is at
			l := leader()
			p.stop(l)
			p.again(l)
		}
		p.rotated(t, at, rotation.Kind(q.Kind))
	}
	for i, k := range p.keys(at).Replicas[0].Keys {
		if exchanged := k.Signs != before[0].Keys[i].Signs; exchanged != strings.HasSuffix(k.Kind, "-ca") {
			t.Errorf("of %s: %s before, %s now", k.Kind, before[0].Keys[i].Signs, k.Signs)
		}
	}
	p.put(away, "after")
	for n := range p.members {
		eventually(t, func() error {
			_, err := p.client(n).CoreV1().ConfigMaps("default").Get(context.Background(), "after", metav1.GetOptions{})
			return err
		})
	}
}

func mustClient(t *testing.T, cfg *rest.Config) *kubernetes.Clientset {
	t.Helper()
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}
