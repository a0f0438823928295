package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore/replica"
)

// plane is a control plane in this process: real replicas on loopback addresses.
type plane struct {
	t       *testing.T // the test that runs now
	whole   *testing.T // the one for which the plane is
	dir     string
	cluster Cluster
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
	for range 100 {
		l, err := net.Listen("tcp", at(address(1), 0))
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		l.Close()
		free := true
		for n := 2; n <= 4 && free; n++ {
			l, err := net.Listen("tcp", at(address(n), port))
			if free = err == nil; free {
				l.Close()
			}
		}
		if free {
			return port
		}
	}
	t.Fatal("no port is free on all addresses")
	return 0
}

// newPlane founds a cluster with one replica that runs, and lets others join.
func newPlane(t *testing.T, replicas int, change func(*Config)) *plane {
	t.Helper()
	p := &plane{t: t, whole: t, dir: t.TempDir(), members: map[string]*running{}}
	p.cluster = Cluster{Name: "test", APIPort: freePort(t), FleetPort: freePort(t), PeerPort: freePort(t)}
	for n := 1; n <= replicas; n++ {
		c := p.config(n)
		if change != nil {
			change(&c)
		}
		if n > 1 {
			p.join(c)
		} else {
			var err error
			if p.founded, err = Init(c, p.cluster, ""); err != nil {
				t.Fatal(err)
			}
			if p.ca, err = pki.Load(TrustFolder(c)); err != nil {
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
	return Config{Name: name, DataDir: filepath.Join(p.dir, name), Advertise: address(n), Version: "test"}
}

func (p *plane) join(c Config) {
	p.t.Helper()
	if err := Join(context.Background(), c, p.founded.ControlPlaneToken, []string{at(address(1), p.cluster.FleetPort)}); err != nil {
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
	go func() { ended <- Run(ctx, c) }()
	stop := sync.OnceValue(func() error { cancel(); return <-ended })
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
	cfg.Host = "https://" + at(p.members[name].cfg.Advertise, p.cluster.APIPort)
	cfg.QPS, cfg.Timeout = -1, 20*time.Second
	return cfg
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
	cm, err := p.client(at).CoreV1().ConfigMaps("default").Create(context.Background(),
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	return cm
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
	path := filepath.Join(p.t.TempDir(), "backup")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// One replica: what it says of itself, its metrics, compaction, and refusals.
func TestOneReplica(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	s := p.status("cp1")
	if s.Cluster != "test" || !strings.HasPrefix(s.ID, "test-") || s.Leader != "cp1" || s.Revision == 0 || s.Keys == 0 || s.Quota != 8<<30 ||
		len(s.Members) != 1 || s.Members[0].Ready != "yes" || s.Members[0].Applied == 0 || s.Members[0].Disk == 0 || s.Members[0].Watchers == 0 || s.Members[0].Version != "test" {
		t.Errorf("status: %+v", s)
	}
	var metrics string
	if err := p.call("cp1", "GET", "/metrics", nil, &metrics); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"keelson_store_", "apiserver_request_total", "go_goroutines", "process_resident_memory_bytes"} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	var compacted api.ClusterCompactResult
	if err := p.call("cp1", "POST", api.PathClusterCompact, api.ClusterCompact{}, &compacted); err != nil || compacted.Compacted < s.Revision {
		t.Errorf("compact: %v %+v", err, compacted)
	}
	for _, c := range []struct {
		verb, path string
		body       any
		code       int32
		want       string
	}{
		{"POST", api.PathClusterCompact, api.ClusterCompact{Revision: 1 << 40}, 400, "--revision 1099511627776 is in the future: the store is at"},
		{"POST", api.PathClusterCompact, map[string]string{"revision": "x"}, 400, "the body of /cluster/compact"},
		{"POST", api.PathClusterStepDown, map[string]string{"nobody": "x"}, 400, `unknown field "nobody"`},
		{"POST", api.PathClusterStepDown, api.ClusterStepDown{}, 400, "cp1 is the only voter"},
		{"POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp1"}, 400, `"cp1" leads already`},
		{"GET", api.PathClusterStepDown, nil, 405, "takes POST only"},
		{"DELETE", api.PathClusterMembers + "/cp1", nil, 409, "cp1 is the only voter"},
		{"DELETE", api.PathClusterMembers + "/cp9", nil, 404, `"cp9" is not among cp1`},
		{"POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9"}, 400, "a name and an address"},
		{"POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9", Address: "nonsense"}, 400, "host:port"},
		{"POST", api.PathClusterVerify, "no backup at all", 400, "backup"},
		{"GET", api.PathClusterBackup, nil, 405, "takes POST only"},
		{"POST", api.PathClusterTokens, map[string]string{"role": "king"}, 400, `role "king"`},
	} {
		err := p.call("cp1", c.verb, c.path, c.body, nil)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || c.code != 0 && status.Status().Code != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s %+v: %v, want %d with %q", c.verb, c.path, c.body, err, c.code, c.want)
		}
	}
	if err := p.call("cp1", "GET", api.PathClusterStatus, nil, nil); err != nil {
		t.Error(err)
	}
	// Another program keeps off the folder while the replica runs.
	cfg := p.members["cp1"].cfg
	if _, err := Inspect(cfg); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("inspect beside a running replica: %v", err)
	}
	if _, err := Restore(cfg, p.founded.Kubeconfig, RestoreOptions{Replace: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("restore beside a running replica: %v", err)
	}
	// Nobody without the right gets near any of it. F34
	anonymous := p.rest("cp1")
	anonymous.CertData, anonymous.KeyData, anonymous.CertFile, anonymous.KeyFile = nil, nil, "", ""
	cs, err := kubernetes.NewForConfig(anonymous)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{api.PathClusterStatus, api.PathClusterBackup, api.PathClusterMembers} {
		if _, err := cs.RESTClient().Get().AbsPath(path).DoRaw(context.Background()); !apierrors.IsUnauthorized(err) && !apierrors.IsForbidden(err) {
			t.Errorf("%s for nobody: %v", path, err)
		}
	}
}

// A backup of a serving cluster makes a new one with the same objects, whose
// clients are told that what they remember is of another time. F52
func TestBackupAndRestore(t *testing.T) {
	p := newPlane(t, 1, nil)
	old := p.put("cp1", "a")
	file := p.backup("cp1")
	p.put("cp1", "after")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(t.TempDir(), "damaged")
	raw[len(raw)/2] ^= 0x10
	if err := os.WriteFile(damaged, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	cfg.Advertise = "" // known from before
	for name, c := range map[string]struct {
		file string
		o    RestoreOptions
		want string
	}{
		"over data":      {file, RestoreOptions{}, "--replace"},
		"a damaged file": {damaged, RestoreOptions{Replace: true}, damaged},
		"no backup":      {p.founded.Kubeconfig, RestoreOptions{Replace: true}, "backup"},
		"no file":        {file + "x", RestoreOptions{Replace: true}, "no such file"},
	} {
		if _, err := Restore(cfg, c.file, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	p.again("cp1") // nothing was changed
	p.holds("cp1", "a", "after")
	p.stop("cp1")

	r, err := Restore(cfg, file, RestoreOptions{Replace: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.Moved); err != nil {
		t.Errorf("the data of before: %v", err)
	}
	p.again("cp1")
	p.holds("cp1", "a")
	if _, err := p.client("cp1").CoreV1().ConfigMaps("default").Get(context.Background(), "after", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("what was written after the backup: %v", err)
	}
	w, err := p.client("cp1").CoreV1().ConfigMaps("default").Watch(context.Background(), metav1.ListOptions{ResourceVersion: old.ResourceVersion})
	if err == nil {
		e := <-w.ResultChan()
		w.Stop()
		err = apierrors.FromObject(e.Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch from before the restore: %v, want 410", err)
	}

	// A cluster of its own takes it only when told to.
	other := p.config(2)
	q := &plane{t: t, whole: t, dir: p.dir, cluster: p.cluster, members: map[string]*running{}}
	if q.founded, err = Init(other, p.cluster, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := Restore(other, file, RestoreOptions{}); err == nil || !strings.Contains(err.Error(), "--any-cluster") {
		t.Errorf("a backup of another cluster: %v", err)
	}
	if _, err := Restore(other, file, RestoreOptions{AnyCluster: true}); err != nil {
		t.Fatal(err)
	}
	q.start(other)
	q.ready("cp2")
	q.holds("cp2", "a")
	if s := q.status("cp2"); len(s.Members) != 1 || s.Leader != "cp2" || s.ID == p.status("cp1").ID {
		t.Errorf("the other cluster: %+v", s)
	}
}

// The log store is changed while the replica is stopped, and stays changed; the
// wrong one by the flag is refused.
func TestConvertLog(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.put("cp1", "a")
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	for _, to := range []string{"wal", "bolt", "wal"} {
		var done, total uint64
		if err := ConvertLog(context.Background(), cfg, to, func(d, n uint64) { done, total = d, n }); err != nil || done != total || total == 0 {
			t.Fatalf("to %s: %v, %d of %d entries", to, err, done, total)
		}
		if i, err := Inspect(cfg); err != nil || string(i.Disk.LogStore) != to || i.Disk.Owner != "cp1" || i.Members["cp1"] == "" {
			t.Errorf("after converting to %s: %v %+v", to, err, i)
		}
	}
	p.again("cp1")
	p.holds("cp1", "a")
	p.put("cp1", "b")
	p.stop("cp1")
	cfg.Store.LogStore, cfg.Log = "bolt", slog.New(slog.DiscardHandler)
	if err := Run(context.Background(), cfg); !errors.Is(err, replica.ErrLogStore) {
		t.Errorf("bolt on a folder with wal: %v", err)
	}
	p.again("cp1")
	p.holds("cp1", "a", "b")
}

// A full quota: writes are refused with a reason, status says what to do, and
// deletes make room.
func TestQuota(t *testing.T) {
	p := newPlane(t, 1, func(c *Config) { c.Store.Quota = minQuota })
	cs := p.client("cp1").CoreV1().ConfigMaps("default")
	var err error
	n := 0
	for ; err == nil && n < 200; n++ {
		_, err = cs.Create(context.Background(), &v1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d", n)}, Data: map[string]string{"d": strings.Repeat("x", 1000<<10)},
		}, metav1.CreateOptions{})
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code != http.StatusInsufficientStorage || !strings.Contains(err.Error(), "it takes deletes only") {
		t.Fatalf("after %d objects of a megabyte: %v", n, err)
	}
	s := p.status("cp1")
	if len(s.Alarms) != 1 || s.Alarms[0].Kind != "space" || s.Alarms[0].Remedy == "" || s.Alarms[0].Since == 0 {
		t.Errorf("alarms: %+v", s.Alarms)
	}
	for i := range n / 2 {
		if err := cs.Delete(context.Background(), fmt.Sprintf("c-%d", i), metav1.DeleteOptions{}); err != nil {
			t.Fatalf("deleting when the quota is used up: %v", err)
		}
	}
	eventually(t, func() error {
		_, err := cs.Create(context.Background(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "again"}}, metav1.CreateOptions{})
		return err
	})
	if s := p.status("cp1"); len(s.Alarms) != 0 {
		t.Errorf("the alarm stays: %+v", s.Alarms)
	}
}

// Certificates live for seconds here: the group goes on, new connections show
// new ones, and a replica that starts again is let in. F51
func TestCertificatesRotate(t *testing.T) {
	const life = 3 * time.Second
	p := newPlane(t, 2, func(c *Config) { c.certificateLife = life })
	began := time.Now()
	shown := func() *x509.Certificate {
		peers, err := pki.NewPeers(TrustFolder(p.members["cp2"].cfg), pki.ReplicaPeer("cp2"), time.Now)
		if err != nil {
			t.Fatal(err)
		}
		conf := peers.Client()
		conf.NextProtos = []string{"h2"}
		conn, err := tls.Dial("tcp", at(p.members["cp1"].cfg.Advertise, p.cluster.PeerPort), conf)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	first := shown()
	n := 0
	eventually(t, func() error {
		p.put([]string{"cp1", "cp2"}[n%2], fmt.Sprintf("c-%d", n))
		n++
		if time.Since(began) < life+life/2 {
			return errors.New("the first certificates are still valid")
		}
		return nil
	})
	if time.Now().Before(first.NotAfter) {
		t.Fatalf("the first certificate is valid until %s", first.NotAfter)
	}
	if now := shown(); now.SerialNumber.Cmp(first.SerialNumber) == 0 {
		t.Error("a new connection shows the certificate that has expired")
	}
	p.stop("cp2")
	p.again("cp2")
	p.put("cp2", "after")
	p.holds("cp1", "after")
}

// The authority of the replicas is exchanged while they run: at each step both
// serve, and in the end a holder of the former keys is not let in. F51
func TestAuthorityExchanged(t *testing.T) {
	p := newPlane(t, 2, nil)
	former, err := pki.NewPeers(TrustFolder(p.members["cp2"].cfg), pki.ReplicaPeer("cp2"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	stranger := former.Client()
	stranger.VerifyConnection = nil // it does not care whom it calls
	file := filepath.Join(t.TempDir(), "authority")
	if _, err := pki.MakePeerCA(file, "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	read := func(name string) int {
		return strings.Count(p.members[name].log.String(), "authorities of the replicas read again")
	}
	for i, step := range []func(dir string) error{
		func(dir string) error { _, err := pki.TrustPeerCA(dir, file); return err },
		func(dir string) error { _, err := pki.UsePeerCA(dir, file); return err },
		pki.ForgetPeerCAs,
	} {
		if err := p.knock(t, "cp1", stranger); err != nil {
			t.Fatalf("before step %d: %v", i, err)
		}
		for _, name := range []string{"cp1", "cp2"} {
			was := read(name)
			if err := step(TrustFolder(p.members[name].cfg)); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() error {
				if read(name) == was {
					return fmt.Errorf("step %d is unknown to %s", i, name)
				}
				return nil
			})
		}
		p.stop("cp2") // its connections are new ones afterwards
		p.again("cp2")
		p.put("cp2", fmt.Sprintf("step-%d", i))
	}
	if err := p.knock(t, "cp1", stranger); err == nil {
		t.Error("a holder of the former keys was let in")
	}
	p.holds("cp1", "step-0", "step-1", "step-2")
}

// Encryption at rest: begun with a key file, its keys exchanged while the
// replica runs, and nothing readable without them.
func TestEncryptionAtRest(t *testing.T) {
	keys := filepath.Join(t.TempDir(), "keys")
	if err := replica.NewKeyFile(keys, "first"); err != nil {
		t.Fatal(err)
	}
	p := newPlane(t, 1, func(c *Config) { c.Store.Keys = keys })
	const mark = "a-name-that-must-not-be-on-the-disk"
	p.put("cp1", mark)
	file := p.backup("cp1")
	if err := replica.AddKey(keys, "second"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if log := p.members["cp1"].log.String(); !strings.Contains(log, "encryption keys read again") || !strings.Contains(log, "current=second") {
			return errors.New("the new key is not in use")
		}
		return nil
	})
	// A file that is broken on its way does no harm.
	good, err := os.ReadFile(keys)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(keys, []byte("second half-a-ke"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if !strings.Contains(p.members["cp1"].log.String(), "encryption keys not taken over, the former ones stay") {
			return errors.New("no complaint about a broken key file")
		}
		return nil
	})
	p.put("cp1", mark+"-2")
	if err := os.WriteFile(keys, good, 0o600); err != nil {
		t.Fatal(err)
	}
	p.stop("cp1")
	cfg := p.members["cp1"].cfg
	err = filepath.WalkDir(filepath.Join(cfg.DataDir, raftFolder), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, []byte(mark)) {
			t.Errorf("%s holds the name of an object in clear", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	bare := cfg
	bare.Store.Keys, bare.Log = "", slog.New(slog.DiscardHandler)
	if err := Run(context.Background(), bare); !errors.Is(err, replica.ErrSealed) {
		t.Errorf("a start without keys: %v", err)
	}
	if _, err := Verify(bare.Store, file); !errors.Is(err, replica.ErrSealed) {
		t.Errorf("verifying a backup without keys: %v", err)
	}
	if i, err := Verify(cfg.Store, file); err != nil || !i.Sealed || i.KeyID != "first" {
		t.Errorf("verifying a backup with keys: %v %+v", err, i)
	}
	p.again("cp1")
	p.holds("cp1", mark, mark+"-2")
}

// Three replicas: status from any of them, stepping down, a member removed and
// refused, and back again; data lost and rebuilt; the majority lost.
func TestThreeReplicas(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.put("cp3", "a")
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{{"status", p.testStatus}, {"step-down", p.testStepDown}, {"remove", p.testRemove}, {"rebuild", p.testRebuild}, {"lost majority", p.testLostMajority}} {
		if !t.Run(step.name, func(t *testing.T) { p.t = t; step.run(t) }) {
			return // each begins with what the one before left
		}
	}
}

func (p *plane) testStatus(t *testing.T) {
	eventually(t, func() error {
		s := p.status("cp2")
		if len(s.Members) != 3 || s.Leader == "" {
			return fmt.Errorf("%+v", s)
		}
		for _, m := range s.Members {
			if m.Ready != "yes" || !m.Voter || m.Applied == 0 || m.Lag > 0 || m.Version != "test" || m.Disk == 0 {
				return fmt.Errorf("%+v", m)
			}
		}
		return nil
	})
	// Compaction works from any replica.
	for name := range p.members {
		var r api.ClusterCompactResult
		if err := p.call(name, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 5}, &r); err != nil || r.Compacted < 5 {
			t.Errorf("compact at %s: %v %+v", name, err, r)
		}
	}
}

func (p *plane) testStepDown(t *testing.T) {
	if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp9"}, nil); !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "cp9") {
		t.Errorf("to a stranger: %v", err)
	}
	for _, to := range []string{"cp2", "cp3", "cp1"} {
		var r api.ClusterStepDownResult
		if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: to}, &r); err != nil || r.To != to {
			t.Fatalf("to %s: %v %+v", to, err, r)
		}
		eventually(t, func() error {
			for name := range p.members {
				if got := p.status(name).Leader; got != to {
					return fmt.Errorf("%s says that %q leads, want %s", name, got, to)
				}
			}
			return nil
		})
		p.put(to, "led-by-"+to)
	}
}

// knock makes a TLS connection to a replica's peer port and waits whether it is kept.
func (p *plane) knock(t *testing.T, to string, conf *tls.Config) error {
	t.Helper()
	conf = conf.Clone()
	conf.NextProtos = []string{"h2"}
	conn, err := tls.Dial("tcp", at(p.members[to].cfg.Advertise, p.cluster.PeerPort), conf)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err = conn.Read(make([]byte, 1)) // a server that took it says its settings
	return err
}

func (p *plane) testRemove(t *testing.T) {
	peers, err := pki.NewPeers(TrustFolder(p.members["cp3"].cfg), pki.ReplicaPeer("cp3"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} {
		if err := p.knock(t, to, peers.Client()); err != nil {
			t.Fatalf("a member at %s: %v", to, err)
		}
	}
	if err := p.call("cp2", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} { // F51
		eventually(t, func() error {
			if err := p.knock(t, to, peers.Client()); err == nil {
				return fmt.Errorf("%s still speaks to a replica that was removed", to)
			}
			return nil
		})
	}
	p.put("cp1", "without-cp3")
	p.stop("cp3")
	// Its data says that it is a member; it is not believed. A new beginning is.
	cfg := p.members["cp3"].cfg
	if _, err := Rebuild(cfg, nil); err != nil {
		t.Fatal(err)
	}
	p.again("cp3")
	p.holds("cp3", "a", "without-cp3")
	eventually(t, func() error {
		if s := p.status("cp1"); len(s.Members) != 3 || !s.Members[0].Voter || !s.Members[1].Voter || !s.Members[2].Voter {
			return fmt.Errorf("%+v", s.Members)
		}
		return p.knock(t, "cp1", peers.Client())
	})
}

func (p *plane) testRebuild(t *testing.T) {
	p.stop("cp2")
	cfg := p.members["cp2"].cfg
	// The disk is lost: without being told, the replica does not vote with an empty log.
	if err := os.RemoveAll(filepath.Join(cfg.DataDir, raftFolder)); err != nil {
		t.Fatal(err)
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	if err := Run(context.Background(), cfg); !errors.Is(err, errDataGone) {
		t.Fatalf("a replica whose data is gone: %v", err)
	}
	p.put("cp1", "without-cp2")
	r, err := Rebuild(cfg, nil)
	if err != nil || len(r.Asks) != 2 {
		t.Fatalf("%v %+v", err, r)
	}
	p.again("cp2")
	p.holds("cp2", "a", "without-cp3", "without-cp2")
	i, err := Inspect(p.members["cp2"].cfg)
	if !errors.Is(err, ErrInUse) {
		t.Errorf("%v %+v", err, i)
	}
}

func (p *plane) testLostMajority(t *testing.T) {
	before := p.put("cp1", "last")
	_ = p.members["cp3"].stop()
	_ = p.members["cp2"].stop()
	eventually(t, func() error { // the one that is left says how it stands
		s := p.status("cp1")
		if s.Leader != "" || len(s.Members) != 3 || s.Members[1].Ready == "yes" || s.Members[2].Ready == "yes" {
			return fmt.Errorf("without a majority: %+v", s)
		}
		return nil
	})
	_ = p.members["cp1"].stop()
	for _, name := range []string{"cp2", "cp3"} {
		if err := os.RemoveAll(p.members[name].cfg.DataDir); err != nil {
			t.Fatal(err)
		}
	}
	cfg := p.members["cp1"].cfg
	lost, err := Recover(cfg, false)
	if index, term := LastEntry(lost.Disk); !errors.Is(err, ErrUnsafe) || len(lost.Members) != 2 || index == 0 || term == 0 {
		t.Fatalf("without being told: %v %+v", err, lost)
	}
	if _, err := Recover(cfg, true); err != nil {
		t.Fatal(err)
	}
	p.again("cp1")
	p.holds("cp1", "a", "last")
	if s := p.status("cp1"); len(s.Members) != 1 || s.Leader != "cp1" {
		t.Errorf("%+v", s)
	}
	now := p.put("cp1", "recovered")
	if len(now.ResourceVersion) < len(before.ResourceVersion) {
		t.Errorf("time went back: %s after %s", now.ResourceVersion, before.ResourceVersion)
	}
	// The others begin anew.
	p.join(p.config(2))
	p.start(p.config(2))
	p.ready("cp2")
	p.holds("cp2", "a", "last", "recovered")
}
