package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// A replica that is told to end answers what it was asked before its store ends: whoever is refused was not heard.
func TestAPIEndsBeforeTheStore(t *testing.T) {
	p := newPlane(t, 1, func(c *Config) { c.ShutdownDelay = 300 * time.Millisecond })
	name := p.config(1).Name
	var written atomic.Int32
	var writers sync.WaitGroup
	for n := range 8 {
		c := p.client(name)
		writers.Go(func() {
			for i := 0; ; i++ {
				cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("w-%d-%d", n, i)}}
				_, err := c.CoreV1().ConfigMaps("default").Create(context.Background(), cm, metav1.CreateOptions{})
				if err == nil {
					written.Add(1)
					continue
				}
				if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("a request was heard and not done: %v", err)
				}
				return
			}
		})
	}
	eventually(t, func() error {
		if written.Load() < 20 {
			return fmt.Errorf("%d writes", written.Load())
		}
		return nil
	})
	before, began := written.Load(), time.Now()
	p.stop(name)
	if took := time.Since(began); took < 300*time.Millisecond {
		t.Errorf("the replica answered for %v after it was told to end", took)
	}
	writers.Wait()
	if written.Load() == before {
		t.Error("nothing was written after the replica was told to end")
	}
}

// A leader that is told to end has another replica lead, and has no right to the address that replicas share any more, while
// it still lets clients in; a request that it has heard of is answered well.
func TestLeaderHandsOverBeforeItsAPIEnds(t *testing.T) {
	const delay = 5 * time.Second // a few questions are asked in it, on a machine that may be busy
	var replicas wiredReplicas
	p := newPlane(t, 3, func(c *Config) { c.ShutdownDelay = delay; replicas.note(c) })
	old := p.status("cp1").Leader
	others := slices.DeleteFunc([]string{"cp1", "cp2", "cp3"}, func(n string) bool { return n == old })
	if err := replicas.get(old).leadsReady(t.Context()); err != nil {
		t.Fatalf("%s has no right to the shared address: %v", old, err)
	}
	client, err := rest.HTTPClientFor(p.rest(old))
	if err != nil {
		t.Fatal(err)
	}
	body, send := io.Pipe()
	url := p.rest(old).Host + "/api/v1/namespaces/default/configmaps"
	answered := make(chan error, 1)
	go func() {
		resp, err := client.Post(url, "application/json", body)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusCreated {
				err = errors.New(resp.Status)
			}
		}
		answered <- err
	}()
	if _, err := io.WriteString(send, `{"apiVersion":"v1","kind":"ConfigMap",`); err != nil { // returns once the client has taken it
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- p.members[old].stop() }()
	eventually(t, func() error {
		for _, name := range others {
			if now := p.status(name).Leader; now == "" || now == old {
				return fmt.Errorf("%s says that %q leads", name, now)
			}
		}
		return nil
	})
	if err := replicas.get(old).leadsReady(t.Context()); err == nil {
		t.Errorf("%s has a right to the shared address still", old)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.rest(old).Host, "https://"))
	if err != nil {
		t.Errorf("another replica leads only after %s has let nobody in any more: %v", old, err)
	} else {
		conn.Close()
	}
	if _, err := io.WriteString(send, `"metadata":{"name":"long"}}`); err != nil {
		t.Error(err)
	}
	send.Close()
	if err := <-answered; err != nil {
		t.Errorf("the request that was under way: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	p.holds(others[0], "long")
}

// What files say of authentication and authorization is read when a replica starts, and wrong ones keep it from
// starting.
func TestAccessIsWired(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(tokens, []byte("secret,bob,1,system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *Config) { c.Authentication.TokenFile, c.Flags = tokens, map[string]string{"name": "cp1"} })
	name := p.config(1).Name
	conf := p.rest(name)
	conf.BearerToken, conf.CertData, conf.KeyData = "secret", nil, nil
	bob, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bob.CoreV1().Secrets("kube-system").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("bob with his token: %v", err)
	}
	flags, err := bob.RESTClient().Get().AbsPath("/flagz").DoRaw(t.Context())
	if err != nil || !strings.Contains(string(flags), "name: cp1") {
		t.Errorf("%s, %v", flags, err)
	}
	wrong := p.config(1)
	wrong.Log, wrong.Authentication.TokenFile = slog.New(slog.DiscardHandler), filepath.Join(t.TempDir(), "none")
	p.stop(name)
	if err := Run(t.Context(), wrong); err == nil {
		t.Error("a replica runs without the tokens that it was told to take")
	}
	p.again(name)
}
