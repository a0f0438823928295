package server_test

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

	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A replica that is shutting down responds to all accepted requests before its store stops. Other
// connections are refused.
func TestAPIStopsBeforeTheStore(t *testing.T) {
	p := newPlane(t, 1, func(c *server.Config) { c.Timing.ShutdownDelay = 300 * time.Millisecond })
	name := p.NewConfig(1).Name
	var written atomic.Int32
	var writers sync.WaitGroup
	for n := range 8 {
		c := p.Client(name)
		writers.Go(func() {
			for i := 0; ; i++ {
				cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("w-%d-%d", n, i)}}
				_, err := c.CoreV1().ConfigMaps("default").Create(context.Background(), cm, metav1.CreateOptions{})
				if err == nil {
					written.Add(1)
					continue
				}
				if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("an accepted request failed: %v", err)
				}
				return
			}
		})
	}
	servertest.Eventually(t, func() error {
		if written.Load() < 20 {
			return fmt.Errorf("%d writes", written.Load())
		}
		return nil
	})
	before, began := written.Load(), time.Now()
	p.StopReplica(name)
	if took := time.Since(began); took < 300*time.Millisecond {
		t.Errorf("the shutdown took only %v", took)
	}
	writers.Wait()
	if written.Load() == before {
		t.Error("nothing was written during the shutdown")
	}
}

// A leader that is shutting down transfers leadership and gives up the virtual IP address while it
// still accepts connections. A request in progress is completed.
func TestLeadershipIsTransferredBeforeTheAPIStops(t *testing.T) {
	const delay = 5 * time.Second // enough for a few requests on a busy machine
	var collector replicaCollector
	p := newPlane(t, 3, func(c *server.Config) { c.Timing.ShutdownDelay = delay; collector.collect(c) })
	old := p.ClusterStatus("cp1").Leader
	others := slices.DeleteFunc([]string{"cp1", "cp2", "cp3"}, func(n string) bool { return n == old })
	if err := collector.get(old).CheckReadyLeader(t.Context()); err != nil {
		t.Fatalf("%s may not hold the shared address: %v", old, err)
	}
	client, err := rest.HTTPClientFor(p.RESTConfig(old))
	if err != nil {
		t.Fatal(err)
	}
	body, send := io.Pipe()
	url := p.RESTConfig(old).Host + "/api/v1/namespaces/default/configmaps"
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
	if _, err := io.WriteString(send, `{"apiVersion":"v1","kind":"ConfigMap",`); err != nil {
		// returns once the client has read the data
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- p.Members[old].Stop() }()
	servertest.Eventually(t, func() error {
		for _, name := range others {
			if now := p.ClusterStatus(name).Leader; now == "" || now == old {
				return fmt.Errorf("%s reports leader %q", name, now)
			}
		}
		return nil
	})
	if err := collector.get(old).CheckReadyLeader(t.Context()); err == nil {
		t.Errorf("%s may still hold the shared address", old)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(p.RESTConfig(old).Host, "https://"))
	if err != nil {
		t.Errorf("%s rejects connections before another replica leads: %v", old, err)
	} else {
		conn.Close()
	}
	if _, err := io.WriteString(send, `"metadata":{"name":"long"}}`); err != nil {
		t.Error(err)
	}
	send.Close()
	if err := <-answered; err != nil {
		t.Errorf("the request in progress: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	p.CheckConfigMaps(others[0], "long")
}

// The files for authentication and authorization are read at the start, and invalid files prevent
// the start.
func TestAccessIsWired(t *testing.T) {
	tokens := filepath.Join(t.TempDir(), "tokens.csv")
	if err := os.WriteFile(tokens, []byte("secret,bob,1,system:masters\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *server.Config) {
		c.Access.Authentication.TokenFile, c.Process.Flags = tokens, map[string]string{"name": "cp1"}
	})
	name := p.NewConfig(1).Name
	conf := p.RESTConfig(name)
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
	wrong := p.NewConfig(1)
	wrong.Process.Log, wrong.Access.Authentication.TokenFile = slog.New(slog.DiscardHandler),
		filepath.Join(t.TempDir(), "none")
	p.StopReplica(name)
	if err := server.Run(t.Context(), wrong); err == nil {
		t.Error("a replica runs without its configured token file")
	}
	p.Restart(name)
}
