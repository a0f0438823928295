// Package rotation has the cluster's CA exchanged with everything that believes it: replicas that are processes and die at
// every step, agents, and clients with tokens as pods have them.
package rotation

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/server/command"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/test/testenv/loopback"
	"keelson.dev/keelson/test/testenv/stream"
)

const asReplica = "KEELSON_TEST_REPLICA"

func TestMain(m *testing.M) {
	if os.Getenv(asReplica) != "" {
		runReplica()
		return
	}
	os.Exit(m.Run())
}

// runReplica runs a replica with the arguments of this process.
func runReplica() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if _, err := command.New("test").ExecuteContextC(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}

const patience = 6 * time.Minute

// testPlane is a control plane of three replica processes, and the credentials of its clients.
type testPlane struct {
	*loopback.Plane
	t         *testing.T
	ctx       context.Context
	processes *loopback.Processes
	admin     string // path of the administrator's kubeconfig, which its replica renews
}

func newTestPlane(t *testing.T) *testPlane {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &testPlane{t: t, ctx: ctx, processes: &loopback.Processes{Program: self, Env: []string{asReplica + "=yes"}}}
	if p.Plane, err = loopback.Start(ctx, t.TempDir(),
		loopback.Shape{Name: "ca", Replicas: 3, Ready: 2 * time.Minute, Run: p.processes.Run,
			NodeTokenUses: 10}); err != nil {
		t.Fatal(err)
	}
	p.admin = p.Founded.Kubeconfig
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// readRoots returns the certificate authorities of a program that reads its file for each
// connection.
func (p *testPlane) readRoots() (*x509.CertPool, error) {
	c, err := clientcmd.LoadFromFile(p.admin)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	for _, cluster := range c.Clusters {
		pool.AppendCertsFromPEM(cluster.CertificateAuthorityData)
	}
	return pool, nil
}

// tokenClient is a client with a token, or with the administrator's certificate of the moment of each connection where there is
// none. It looks at the authorities at every connection, as a program does that reads ca.crt again.
func (p *testPlane) tokenClient(replica, token string) *kubernetes.Clientset {
	p.t.Helper()
	host, err := url.Parse(p.Config(replica).Host)
	if err != nil {
		p.t.Fatal(err)
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
		VerifyConnection: func(cs tls.ConnectionState) error {
			pool, err := p.readRoots()
			if err != nil {
				return err
			}
			_, err = cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool, DNSName: host.Hostname()})
			return err
		}}
	if token == "" {
		conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c, err := clientcmd.LoadFromFile(p.admin)
			if err != nil {
				return nil, err
			}
			for _, user := range c.AuthInfos {
				cert, err := tls.X509KeyPair(user.ClientCertificateData, user.ClientKeyData)
				return &cert, err
			}
			return nil, errors.New("the kubeconfig has no user")
		}
	}
	cs, err := kubernetes.NewForConfig(&rest.Config{Host: p.Config(replica).Host, BearerToken: token, QPS: -1,
		Transport: &http.Transport{
			TLSClientConfig: conf, DialContext: (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
			ForceAttemptHTTP2: true, DisableKeepAlives: token == ""}})
	if err != nil {
		p.t.Fatal(err)
	}
	return cs
}

// callOperator calls a path of the control plane at any replica.
func (p *testPlane) callOperator(verb, path string, body, answer any) error {
	var failed []error
	for _, name := range p.Names() {
		r := p.tokenClient(name, "").RESTClient().Verb(verb).AbsPath(path)
		if body != nil {
			raw, err := json.Marshal(body)
			if err != nil {
				return err
			}
			r = r.Body(raw)
		}
		ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
		raw, err := r.DoRaw(ctx)
		cancel()
		if err == nil {
			if answer == nil {
				return nil
			}
			return json.Unmarshal(raw, answer)
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

func (p *testPlane) awaitCondition(what string, is func() error) {
	p.t.Helper()
	await.Until(p.ctx, p.t, patience, 50*time.Millisecond, what, is)
}

// rotationStep returns the current step of the rotation and the condition for which it waits.
func (p *testPlane) rotationStep() (string, string, error) {
	var all api.ClusterKeys
	if err := p.callOperator("GET", api.PathClusterKeys, nil, &all); err != nil || all.Rotation == nil {
		return "", "", errors.Join(err, errors.New("no exchange is known"))
	}
	return all.Rotation.Step, strings.Join(all.Waiting, "\n"), nil
}

func (p *testPlane) awaitStep(step, what string) {
	p.t.Helper()
	p.awaitCondition("step "+step, func() error {
		at, waits, err := p.rotationStep()
		if err == nil && (at != step || !strings.Contains(waits, what)) {
			err = fmt.Errorf("the rotation is at step %s and waits for %q", at, waits)
		}
		return err
	})
}

// killLeader kills the leader's process during the load and starts it again.
func (p *testPlane) killLeader(load *stream.Load) {
	p.t.Helper()
	var victim string
	leads := func() (name string, err error) {
		var s api.ClusterStatus
		err = p.callOperator("GET", api.PathClusterStatus, nil, &s)
		if err == nil && s.Leader == "" {
			err = errors.New("nobody leads")
		}
		return s.Leader, err
	}
	p.awaitCondition("a leader", func() (err error) { victim, err = leads(); return err })
	load.ExpectLoss(victim)
	back, err := p.processes.Kill(victim)
	if err != nil {
		p.t.Fatal(err)
	}
	p.awaitCondition("another leader", func() error {
		name, err := leads()
		if err == nil && name == victim {
			err = errors.New("the leader is the killed replica")
		}
		return err
	})
	back()
	p.awaitCondition(victim+" to be back", func() error {
		_, err := p.tokenClient(victim, "").RESTClient().Get().AbsPath("/readyz").DoRaw(p.ctx)
		return err
	})
	load.ExpectLoss("")
}

// runAgents runs nodes until stop is called.
func (p *testPlane) runAgents(dir string, names ...string) (stop func()) {
	ctx, cancel := context.WithCancel(p.ctx)
	var all sync.WaitGroup
	for i, name := range names {
		a := loopback.Agent{Name: name, Token: p.Founded.NodeToken, Dir: filepath.Join(dir, name)}
		for r := range p.Names() {
			a.Servers = append(a.Servers, p.FleetAddress((i+r)%len(p.Names())))
		}
		all.Go(func() {
			if err := a.Run(ctx); err != nil && ctx.Err() == nil {
				p.t.Errorf("agent %s: %v", name, err)
			}
		})
	}
	stop = sync.OnceFunc(func() { cancel(); all.Wait() })
	p.t.Cleanup(stop)
	return stop
}

func (p *testPlane) awaitReady(nodes ...string) {
	p.t.Helper()
	for _, name := range nodes {
		p.awaitCondition("node "+name, func() error {
			n, err := p.tokenClient("cp1", "").CoreV1().Nodes().Get(p.ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool {
				return c.Type == v1.NodeReady && c.Status == v1.ConditionTrue
			}) {
				return fmt.Errorf("%+v", n.Status.Conditions)
			}
			return nil
		})
	}
}

// newToken returns a token of an account with all rights, like a pod's token.
func (p *testPlane) newToken() string {
	p.t.Helper()
	cs := p.tokenClient("cp1", "")
	var text string
	p.awaitCondition("a token", func() error {
		got, err := cs.CoreV1().ServiceAccounts("default").CreateToken(p.ctx, "default",
			&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		if err == nil {
			text = got.Status.Token
		}
		return err
	})
	_, err := cs.RbacV1().ClusterRoleBindings().Create(p.ctx,
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "load"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: "default"}}},
		metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return text
}

// The cluster CA is rotated while leaders are killed at its steps, clients with tokens write, read
// and watch at every replica, and one of three agents is absent at first. No call at a running
// replica fails, no acknowledged write is lost, each watch delivers the same history, and every
// node is Ready in the end, with the new CA only. F51 F94
func TestLeadersDieWhileTheCAIsExchanged(t *testing.T) {
	p := newTestPlane(t)
	dir := t.TempDir()
	p.runAgents(dir, "w1", "w2")
	away := p.runAgents(dir, "w3")
	p.awaitReady("w1", "w2", "w3")
	away()
	token := p.newToken()
	load := &stream.Load{Names: p.Names(), Clients: map[string]kubernetes.Interface{}, Namespace: "default",
		Call: 20 * time.Second}
	for _, name := range load.Names {
		load.Clients[name] = p.tokenClient(name, token)
	}
	ctx, end := context.WithCancel(p.ctx)
	defer load.Wait()
	defer end()
	if err := load.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := p.callOperator("POST", api.PathClusterKeys, api.ClusterRotate{Kind: "cluster-ca", Keep: "1h"},
		nil); err != nil {
		t.Fatal(err)
	}
	p.awaitStep("trust", "node w3: it is away")
	p.killLeader(load)
	away = p.runAgents(dir, "w3")
	p.awaitStep("wait", "until")
	p.killLeader(load)
	p.awaitReady("w1", "w2", "w3")
	p.awaitCondition("the step to be hastened", func() error {
		return p.callOperator("POST", api.PathClusterKeys, api.ClusterRotate{Kind: "cluster-ca", Force: true}, nil)
	})
	p.killLeader(load) // at whichever step it is
	p.awaitStep("done", "")
	p.awaitReady("w1", "w2", "w3")
	p.awaitOneAuthority(filepath.Join(dir, "w3", "state", "ca.crt"))
	seen, err := load.Finish(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", seen)
	if err := seen.Err(); err != nil {
		t.Error(err)
	}
}

// awaitOneAuthority waits until a node's file has exactly one authority.
func (p *testPlane) awaitOneAuthority(file string) {
	p.t.Helper()
	p.awaitCondition(file, func() error {
		raw, err := os.ReadFile(file)
		if n := strings.Count(string(raw), "BEGIN CERTIFICATE"); err == nil && n != 1 {
			err = fmt.Errorf("it has %d certificates", n)
		}
		return err
	})
}
