package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/internal/wait"
)

// plane is a control plane in this process: real replicas on loopback addresses.
type plane struct {
	t       *testing.T // the test that runs now
	whole   *testing.T // the one for which the plane is
	dir     string
	cluster datadir.Cluster
	founded Founded
	ca      *pki.Trust
	members map[string]*running
}

type running struct {
	cfg  Config
	log  *lines
	stop func() error // ends it and returns how it ended
}

// lines keeps what a replica logs, for when a test fails.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

const soon = 60 * time.Second

func eventually(t *testing.T, cond func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	if err := wait.For(ctx, 20*time.Millisecond, cond); err != nil {
		t.Fatal(err)
	}
}

// address is a loopback address of its own for each replica.
func address(n int) string { return fmt.Sprintf("127.0.0.%d", 10+n) }

// freePort is one that is free on all replicas' addresses.
func freePort(t *testing.T) int {
	t.Helper()
	for range 1000 {
		// Below what the kernel gives to those who name no port: a test beside this one is not given it meanwhile.
		port := 20000 + rand.IntN(10000)
		free := true
		for n := 1; n <= 4 && free; n++ {
			l, err := net.Listen("tcp", datadir.HostPort(address(n), port))
			if free = err == nil; free {
				l.Close()
			}
		}
		if _, given := givenPorts.LoadOrStore(port, true); free && !given {
			return port
		}
	}
	t.Fatal("no port is free on all addresses")
	return 0
}

// givenPorts are ports that tests of this process have got: they may not listen there yet.
var givenPorts sync.Map

// newPlane founds a cluster with one replica that runs, and lets others join.
func newPlane(t *testing.T, replicas int, change func(*Config)) *plane {
	t.Helper()
	p := &plane{t: t, whole: t, dir: t.TempDir(), members: map[string]*running{}}
	p.cluster = datadir.Cluster{Name: "test", APIPort: freePort(t), FleetPort: freePort(t), PeerPort: freePort(t)}
	for n := 1; n <= replicas; n++ {
		c := p.config(n)
		if change != nil {
			change(&c)
		}
		if n > 1 {
			p.join(c)
		} else {
			var err error
			if p.founded, err = Init(c, p.cluster, Founding{ReplicaTokenUses: 100}); err != nil {
				t.Fatal(err)
			}
			if p.ca, err = pki.Load(recovery.TrustFolder(c.Dir())); err != nil {
				t.Fatal(err)
			}
		}
		p.start(c)
		p.ready(c.Name)
	}
	return p
}

func (p *plane) config(n int) Config {
	name := fmt.Sprintf("cp%d", n)
	return Config{Name: name, DataDir: filepath.Join(p.dir, name), Advertise: address(n), Version: "test",
		Store: datadir.StoreOptions{Heartbeat: 3 * time.Second}} // a machine that stalls for a second has nobody else lead
}

func (p *plane) join(c Config) {
	p.t.Helper()
	if err := Join(context.Background(), c, p.founded.ControlPlaneToken, []string{datadir.HostPort(address(1), p.cluster.FleetPort)}); err != nil {
		p.t.Fatal(err)
	}
}

// start runs a replica until stop or the end of the test.
func (p *plane) start(c Config) {
	p.t.Helper()
	l := &lines{}
	c.Log = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})).With("replica", c.Name)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		err := Run(ctx, c)
		if err != nil && ctx.Err() == nil {
			c.Log.Error("the replica ended by itself", "err", err)
		}
		ended <- err
	}()
	stop := sync.OnceValue(func() error { p.hangUp(c.Name); cancel(); return <-ended })
	p.members[c.Name] = &running{cfg: c, log: l, stop: stop}
	p.whole.Cleanup(func() {
		_ = stop()
		if p.whole.Failed() {
			text := l.String()
			p.whole.Logf("the end of the log of %s:\n%s", c.Name, text[max(0, len(text)-6000):])
		}
	})
}

func (p *plane) stop(name string) {
	p.t.Helper()
	if err := p.members[name].stop(); err != nil {
		p.t.Fatalf("stopping %s: %v", name, err)
	}
}

func (p *plane) again(name string) {
	p.t.Helper()
	p.start(p.members[name].cfg)
	p.ready(name)
}

func (p *plane) ready(name string) {
	p.t.Helper()
	cs := p.client(name)
	eventually(p.t, func() error {
		_, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		return err
	})
}

func (p *plane) rest(name string) *rest.Config {
	p.t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", p.founded.Kubeconfig)
	if err != nil {
		p.t.Fatal(err)
	}
	cfg.Host = "https://" + datadir.HostPort(p.members[name].cfg.Advertise, p.cluster.APIPort)
	cfg.QPS, cfg.Timeout = -1, soon
	return cfg
}

// hangUp closes the connections of the test's own clients that are idle: for each that is open the API takes a second to
// end, in which its client may still have begun a request.
func (p *plane) hangUp(name string) {
	p.t.Helper()
	client, err := rest.HTTPClientFor(p.rest(name))
	if err != nil {
		p.t.Fatal(err)
	}
	utilnet.CloseIdleConnectionsFor(client.Transport)
}

func (p *plane) client(name string) *kubernetes.Clientset {
	p.t.Helper()
	cs, err := kubernetes.NewForConfig(p.rest(name))
	if err != nil {
		p.t.Fatal(err)
	}
	return cs
}

// call asks a path of the control plane; the error is a refusal.
func (p *plane) call(name, verb, path string, body, answer any) error {
	p.t.Helper()
	r := p.client(name).RESTClient().Verb(verb).RequestURI(path)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			p.t.Fatal(err)
		}
		r = r.Body(raw)
	}
	res := r.Do(context.Background())
	if err := res.Error(); err != nil {
		return err
	}
	raw, err := res.Raw()
	if err != nil || answer == nil {
		return err
	}
	if s, ok := answer.(*string); ok {
		*s = string(raw)
		return nil
	}
	return json.Unmarshal(raw, answer)
}

func (p *plane) status(name string) api.ClusterStatus {
	p.t.Helper()
	var s api.ClusterStatus
	if err := p.call(name, "GET", api.PathClusterStatus, nil, &s); err != nil {
		p.t.Fatal(err)
	}
	return s
}

func (p *plane) put(at, name string) *v1.ConfigMap {
	p.t.Helper()
	cm, err := p.create(at, name)
	if err != nil {
		p.t.Fatal(err)
	}
	return cm
}

// create creates a ConfigMap at a replica.
func (p *plane) create(at, name string) (*v1.ConfigMap, error) {
	return p.client(at).CoreV1().ConfigMaps("default").Create(context.Background(),
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
}

func (p *plane) holds(at string, names ...string) {
	p.t.Helper()
	for _, name := range names {
		if _, err := p.client(at).CoreV1().ConfigMaps("default").Get(context.Background(), name, metav1.GetOptions{}); err != nil {
			p.t.Errorf("%s at %s: %v", name, at, err)
		}
	}
}

// backup takes one from a replica, through its API, and returns the file.
func (p *plane) backup(name string) string {
	p.t.Helper()
	client, err := rest.HTTPClientFor(p.rest(name))
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := client.Post(p.rest(name).Host+api.PathClusterBackup, "", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		p.t.Fatalf("%s %v: %.200s", resp.Status, err, raw)
	}
	if resp.Trailer.Get(api.HeaderBackupSum) == "" {
		p.t.Error("no checksum follows the backup")
	}
	if !bytes.HasPrefix(raw, []byte(api.BackupMagic)) {
		p.t.Errorf("a backup begins with %.8q, and kctl takes it for none", raw)
	}
	path := filepath.Join(p.t.TempDir(), "backup")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// knock makes a TLS connection to a replica's peer port and waits whether it is kept.
func (p *plane) knock(t *testing.T, to string, conf *tls.Config) error {
	t.Helper()
	conf = conf.Clone()
	conf.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", datadir.HostPort(p.members[to].cfg.Advertise, p.cluster.PeerPort), conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	_, err = conn.Read(make([]byte, 1)) // a server that took it says its settings
	return err
}

// wiredReplicas are those of a plane that run, or ran last.
type wiredReplicas struct {
	mu     sync.Mutex
	byName map[string]*Replica
}

func (w *wiredReplicas) note(c *Config) {
	c.wired = func(r *Replica) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.byName == nil {
			w.byName = map[string]*Replica{}
		}
		w.byName[r.cfg.Name] = r
	}
}

func (w *wiredReplicas) get(name string) *Replica {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byName[name]
}
