// Package servertest runs control planes for tests: real replicas in the process of the test, on
// loopback addresses.
package servertest

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
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
	"keelson.dev/keelson/controlplane/server"
)

// maxLogShown is the maximum size of a replica's log that a failed test prints, in bytes.
const maxLogShown = 6000

// Plane is a control plane of real replicas. If a method fails, it fails the test T, unless it
// returns an error.
type Plane struct {
	T       *testing.T // the running test; a subtest may set its own
	Dir     string     // directory of the data directories of all replicas
	Cluster datadir.Cluster
	Founded server.InitResult
	Trust   *pki.Trust // keys and CAs of the first replica at its creation
	Members map[string]*Member

	whole *testing.T // the test that created the plane
}

// Member is a replica of a plane.
type Member struct {
	Config server.Config
	Log    *LogBuffer
	Stop   func() error // stops the replica and returns the error of server.Run
}

// LogBuffer collects log messages. It is safe for concurrent use.
type LogBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (l *LogBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// String returns all messages.
func (l *LogBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// NewPlane creates a cluster with the given number of replicas and waits until all of them are
// ready. change edits the configuration of each replica before it starts; it may be nil. At the end
// of the test, the replicas stop; if the test has failed, their logs are printed.
func NewPlane(t *testing.T, replicas int, change func(*server.Config)) *Plane {
	t.Helper()
	p := EmptyPlane(t, t.TempDir())
	p.Cluster = datadir.Cluster{Name: "test", APIPort: FreePort(t), FleetPort: FreePort(t), PeerPort: FreePort(t)}
	for n := 1; n <= replicas; n++ {
		c := p.NewConfig(n)
		if change != nil {
			change(&c)
		}
		if n > 1 {
			p.Join(c)
		} else {
			var err error
			if p.Founded, err = server.Init(c, p.Cluster, server.InitOptions{ReplicaTokenUses: 100}); err != nil {
				t.Fatal(err)
			}
			if p.Trust, err = pki.Load(recovery.TrustFolder(c.Dir())); err != nil {
				t.Fatal(err)
			}
		}
		p.StartReplica(c)
		p.AwaitReady(c.Name)
	}
	return p
}

// EmptyPlane returns a plane without replicas. The data directories of its replicas will be in dir.
func EmptyPlane(t *testing.T, dir string) *Plane {
	return &Plane{T: t, whole: t, Dir: dir, Members: map[string]*Member{}}
}

// Whole returns the test that created the plane, even while T is a subtest.
func (p *Plane) Whole() *testing.T { return p.whole }

// NewConfig returns the configuration of replica number n. The name of the replica is cpN, such as
// cp1.
func (p *Plane) NewConfig(n int) server.Config {
	name := fmt.Sprintf("cp%d", n)
	return server.Config{Name: name, DataDir: filepath.Join(p.Dir, name), Advertise: Address(n),
		Process: server.ProcessConfig{Version: "test"},
		// With this timeout, the leader stays the same on a machine that stalls for a second.
		Store: datadir.StoreOptions{Heartbeat: 3 * time.Second}}
}

// Join creates the data directory of another replica with the configuration c, by a request to the
// first replica. The replica becomes a member when it is started.
func (p *Plane) Join(c server.Config) {
	p.T.Helper()
	servers := []string{datadir.HostPort(Address(1), p.Cluster.FleetPort)}
	if err := server.Join(context.Background(), c, p.Founded.ControlPlaneToken, servers); err != nil {
		p.T.Fatal(err)
	}
}

// StartReplica runs a replica with the configuration c in the background, until it is stopped or
// the test ends.
func (p *Plane) StartReplica(c server.Config) {
	p.T.Helper()
	l := &LogBuffer{}
	c.Process.Log = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})).With("replica",
		c.Name)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() {
		err := server.Run(ctx, c)
		if err != nil && ctx.Err() == nil {
			c.Process.Log.Error("the replica stopped by itself", "err", err)
		}
		stopped <- err
	}()
	stop := sync.OnceValue(func() error { p.CloseIdleConnections(c.Name); cancel(); return <-stopped })
	p.Members[c.Name] = &Member{Config: c, Log: l, Stop: stop}
	p.whole.Cleanup(func() {
		_ = stop()
		if p.whole.Failed() {
			text := l.String()
			p.whole.Logf("the end of the log of %s:\n%s", c.Name, text[max(0, len(text)-maxLogShown):])
		}
	})
}

// StopReplica stops the replica with the given name.
func (p *Plane) StopReplica(name string) {
	p.T.Helper()
	if err := p.Members[name].Stop(); err != nil {
		p.T.Fatalf("stopping %s: %v", name, err)
	}
}

// Restart starts the stopped replica with the given name, and waits until it is ready.
func (p *Plane) Restart(name string) {
	p.T.Helper()
	p.StartReplica(p.Members[name].Config)
	p.AwaitReady(name)
}

// AwaitReady waits until the replica with the given name is ready.
func (p *Plane) AwaitReady(name string) {
	p.T.Helper()
	cs := p.Client(name)
	Eventually(p.T, func() error {
		_, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		return err
	})
}

// RESTConfig returns the client configuration of the administrator for the API of the replica with
// the given name.
func (p *Plane) RESTConfig(name string) *rest.Config {
	p.T.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", p.Founded.Kubeconfig)
	if err != nil {
		p.T.Fatal(err)
	}
	cfg.Host = "https://" + datadir.HostPort(p.Members[name].Config.Advertise, p.Cluster.APIPort)
	cfg.QPS, cfg.Timeout = -1, Patience
	return cfg
}

// CloseIdleConnections closes the idle connections of the test's clients to the replica with the
// given name. When the API server stops, it waits a second for each of them, because the client may
// have sent a request.
func (p *Plane) CloseIdleConnections(name string) {
	p.T.Helper()
	client, err := rest.HTTPClientFor(p.RESTConfig(name))
	if err != nil {
		p.T.Fatal(err)
	}
	utilnet.CloseIdleConnectionsFor(client.Transport)
}

// Client returns an administrator's client for the API of the replica with the given name.
func (p *Plane) Client(name string) *kubernetes.Clientset {
	p.T.Helper()
	return NewClient(p.T, p.RESTConfig(name))
}

// NewClient returns a client with the configuration cfg.
func NewClient(t *testing.T, cfg *rest.Config) *kubernetes.Clientset {
	t.Helper()
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

// Call sends a request with the JSON body to a path of the API of the replica with the given name.
// It decodes the response into answer, or stores it as text if answer is a *string. body and answer
// may be nil. The error contains the message of an error response.
func (p *Plane) Call(name, method, path string, body, answer any) error {
	p.T.Helper()
	r := p.Client(name).RESTClient().Verb(method).RequestURI(path)
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			p.T.Fatal(err)
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

// ClusterStatus returns the cluster status that the replica with the given name reports.
func (p *Plane) ClusterStatus(name string) api.ClusterStatus {
	p.T.Helper()
	var s api.ClusterStatus
	if err := p.Call(name, http.MethodGet, api.PathClusterStatus, nil, &s); err != nil {
		p.T.Fatal(err)
	}
	return s
}

// Keys returns the status of the cluster's keys, as the replica with the given name reports it.
func (p *Plane) Keys(name string) (keys api.ClusterKeys) {
	p.T.Helper()
	if err := p.Call(name, http.MethodGet, api.PathClusterKeys, nil, &keys); err != nil {
		p.T.Fatal(err)
	}
	return keys
}

// PutConfigMap creates a ConfigMap with the given name in namespace default, through the API of
// replica. If that fails, the test fails.
func (p *Plane) PutConfigMap(replica, name string) *v1.ConfigMap {
	p.T.Helper()
	cm, err := p.CreateConfigMap(replica, name)
	if err != nil {
		p.T.Fatal(err)
	}
	return cm
}

// CreateConfigMap is like PutConfigMap, and returns an error instead of failing the test.
func (p *Plane) CreateConfigMap(replica, name string) (*v1.ConfigMap, error) {
	return p.Client(replica).CoreV1().ConfigMaps("default").Create(context.Background(),
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
}

// CheckConfigMaps reports a test error for each name in names for which replica returns no
// ConfigMap in namespace default.
func (p *Plane) CheckConfigMaps(replica string, names ...string) {
	p.T.Helper()
	for _, name := range names {
		if _, err := p.Client(replica).CoreV1().ConfigMaps("default").Get(context.Background(), name,
			metav1.GetOptions{}); err != nil {
			p.T.Errorf("%s at %s: %v", name, replica, err)
		}
	}
}

// Backup requests a backup from the API of the replica with the given name, and writes it to a
// temporary file. It returns the path of that file.
func (p *Plane) Backup(name string) string {
	p.T.Helper()
	client, err := rest.HTTPClientFor(p.RESTConfig(name))
	if err != nil {
		p.T.Fatal(err)
	}
	resp, err := client.Post(p.RESTConfig(name).Host+api.PathClusterBackup, "", nil)
	if err != nil {
		p.T.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		p.T.Fatalf("%s %v: %.200s", resp.Status, err, raw)
	}
	if resp.Trailer.Get(api.HeaderBackupSum) == "" {
		p.T.Error("the backup has no checksum in the trailer")
	}
	if !bytes.HasPrefix(raw, []byte(api.BackupMagic)) {
		p.T.Errorf("a backup starts with %.8q, which kctl does not recognize", raw)
	}
	path := filepath.Join(p.T.TempDir(), "backup")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		p.T.Fatal(err)
	}
	return path
}

// DialPeer opens a TLS connection to the peer port of the replica with the given name. It waits
// until the replica sends data or closes the connection. It returns an error if the replica refuses
// the connection.
func (p *Plane) DialPeer(t *testing.T, name string, conf *tls.Config) error {
	t.Helper()
	conf = conf.Clone()
	conf.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", datadir.HostPort(p.Members[name].Config.Advertise, p.Cluster.PeerPort), conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	_, err = conn.Read(make([]byte, 1)) // a replica that accepts the connection sends its settings
	return err
}

// Restore stops the replica with the given name, replaces its data by the backup in file, and
// starts the replica again.
func (p *Plane) Restore(name, file string) {
	p.T.Helper()
	p.StopReplica(name)
	if _, err := recovery.Restore(p.Members[name].Config.Dir(), file, recovery.RestoreOptions{Replace: true}); err !=
		nil {
		p.T.Fatal(err)
	}
	p.Restart(name)
}
