package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/server/rotation"
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

// Each key that replicas share is exchanged while three replicas serve a load of writes and watches: no call fails, no
// watch ends; what the former service account key signed is good until the end and no longer; a replica that starts
// again, and one that joins afterwards, take part. F51
func TestKeysRotate(t *testing.T) {
	p := newPlane(t, 3, nil)
	ctx := context.Background()
	token := func(at string) string {
		t.Helper()
		got, err := p.client(at).CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return got.Status.Token
	}
	var old string
	eventually(t, func() error {
		_, err := p.client("cp1").CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
	old = token("cp1")
	kept := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "kept", Annotations: map[string]string{v1.ServiceAccountNameKey: "default"}},
		Type: v1.SecretTypeServiceAccountToken}
	if _, err := p.client("cp1").CoreV1().Secrets("default").Create(ctx, kept, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ofSecret := func() (text string) {
		eventually(t, func() error {
			s, err := p.client("cp1").CoreV1().Secrets("default").Get(ctx, "kept", metav1.GetOptions{})
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
	firstOfSecret := ofSecret()

	work := p.traffic(t)
	for _, kind := range []rotation.Kind{rotation.PeersCA, rotation.EncryptionKey} {
		if err := p.call("cp2", "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(kind)}, nil); err != nil {
			t.Fatal(err)
		}
		p.rotated(t, "cp3", kind)
	}

	// The service account key stays at the step in which both are believed, until it is told not to wait.
	if err := p.call("cp2", "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if all := p.keys("cp1"); all.Rotation.Step != string(rotation.Wait) || !strings.Contains(strings.Join(all.Waiting, "\n"), "Secret default/kept") {
			return fmt.Errorf("%+v, waiting for %q", all.Rotation, all.Waiting)
		}
		return nil
	})
	if err := p.call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(rotation.PeersCA)}, nil); err == nil || !strings.Contains(err.Error(), "only one at a time") {
		t.Errorf("a second exchange beside the first: %v", err)
	}
	if err := p.call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Abort: true}, nil); err == nil || !strings.Contains(err.Error(), "in use already") {
		t.Errorf("abort after the use: %v", err)
	}
	young := token("cp3")
	if pki.KeyIDOf(young) == pki.KeyIDOf(old) {
		t.Error("a new token is signed with the former key")
	}
	for name := range p.members {
		var jwks string
		if err := p.call(name, "GET", "/openid/v1/jwks", nil, &jwks); err != nil || !strings.Contains(jwks, pki.KeyIDOf(old)) || !strings.Contains(jwks, pki.KeyIDOf(young)) {
			t.Errorf("the keys that %s publishes: %s, %v", name, jwks, err)
		}
		for what, text := range map[string]string{"former": old, "new": young, "Secret's": firstOfSecret} {
			if err := p.asToken(name, text); err != nil {
				t.Errorf("the %s token at %s: %v", what, name, err)
			}
		}
	}
	if err := p.call("cp3", "POST", api.PathClusterKeys, api.ClusterRotate{Force: true}, nil); err != nil {
		t.Fatal(err)
	}
	p.rotated(t, "cp1", rotation.ServiceAccountKey)
	if err := work.end(); err != nil {
		t.Errorf("during the exchange: %v", err)
	}
	for name := range p.members {
		if err := p.asToken(name, old); err == nil {
			t.Errorf("%s still believes the former key", name)
		}
		if err := p.asToken(name, firstOfSecret); err == nil {
			t.Errorf("%s still believes the former key's token of a Secret", name)
		}
		for what, text := range map[string]string{"new": young, "Secret's": ofSecret()} {
			if err := p.asToken(name, text); err != nil {
				t.Errorf("the %s token at %s: %v", what, name, err)
			}
		}
	}

	p.stop("cp2")
	p.again("cp2")
	late := p.config(4)
	p.join(late)
	p.start(late)
	p.ready("cp4")
	if err := p.asToken("cp4", young); err != nil {
		t.Errorf("a token at a replica that joined afterwards: %v", err)
	}
	for name, m := range p.members {
		files, err := os.ReadDir(TrustFolder(m.cfg))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if info, err := f.Info(); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("%s of %s has mode %v, %v", f.Name(), name, info.Mode(), err)
			}
		}
		if name != "cp4" {
			if _, err := os.Stat(filepath.Join(TrustFolder(m.cfg), formerKeysFile)); err != nil {
				t.Errorf("the key of former backups at %s: %v", name, err)
			}
		}
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
	post(at, api.ClusterRotate{Kind: "peers-ca"})
	for range 3 { // whatever step it is at
		l := leader()
		p.stop(l)
		p.again(l)
	}
	p.rotated(t, at, rotation.PeersCA)
	if now := p.keys(at).Replicas; now[0].Keys[0].Signs == before[0].Keys[0].Signs {
		t.Errorf("nothing was exchanged: %+v", now)
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
