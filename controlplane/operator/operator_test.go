package operator_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// TestOneReplica tests a cluster of one replica: its status, its metrics, compaction, and refused
// requests.
func TestOneReplica(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
	s := p.ClusterStatus("cp1")
	if s.Cluster != "test" || !strings.HasPrefix(s.ID, "test-") || s.Leader != "cp1" || s.Revision == 0 ||
		s.Keys == 0 || s.Quota != 8<<30 ||
		len(s.Members) != 1 || s.Members[0].Ready != "yes" || s.Members[0].Applied == 0 || s.Members[0].Disk == 0 ||
		s.Members[0].Watchers == 0 || s.Members[0].Version != "test" {
		t.Errorf("status: %+v", s)
	}
	servertest.Eventually(t, func() error { // the controllers may be starting
		var metrics string
		if err := p.Call("cp1", "GET", "/metrics", nil, &metrics); err != nil {
			return err
		}
		for _, want := range []string{"keelson_store_", "apiserver_request_total", "go_goroutines",
			`workqueue_adds_total{name="namespace"}`, `workqueue_depth{name="endpoint_slice"}`,
			"process_resident_memory_bytes"} {
			if !strings.Contains(metrics, want) {
				return fmt.Errorf("the metrics do not contain %s", want)
			}
		}
		return nil
	})
	var compacted api.ClusterCompactResult
	if err := p.Call("cp1", "POST", api.PathClusterCompact, api.ClusterCompact{}, &compacted); err != nil ||
		compacted.Compacted < s.Revision {
		t.Errorf("compact: %v %+v", err, compacted)
	}
	for _, c := range []struct {
		verb, path string
		body       any
		code       int32
		want       string
	}{
		{"POST", api.PathClusterCompact, api.ClusterCompact{Revision: 1 << 40}, 400,
			"--revision 1099511627776 is in the future: the store is at"},
		{"POST", api.PathClusterCompact, map[string]string{"revision": "x"}, 400, "the body of /cluster/compact"},
		{"POST", api.PathClusterStepDown, map[string]string{"unknown": "x"}, 400, `unknown field "unknown"`},
		{"POST", api.PathClusterStepDown, api.ClusterStepDown{}, 400, "cp1 is the only voter"},
		{"POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp1"}, 400, `"cp1" leads already`},
		{"GET", api.PathClusterStepDown, nil, 405, "takes POST only"},
		{"DELETE", api.PathClusterMembers + "/cp1", nil, 409, "cp1 is the only voter"},
		{"DELETE", api.PathClusterMembers + "/cp9", nil, 404, `"cp9" is not among cp1`},
		{"POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9"}, 400, "a name and an address"},
		{"POST", api.PathClusterMembers, api.ClusterJoin{Name: "cp9", Address: "nonsense"}, 400, "host:port"},
		{"POST", api.PathClusterVerify, "no backup at all", 400, "backup"},
		{"GET", api.PathClusterBackup, nil, 405, "takes POST only"},
		{"POST", api.PathClusterTokens, map[string]string{"role": "unknown"}, 400, `role "unknown"`},
	} {
		err := p.Call("cp1", c.verb, c.path, c.body, nil)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || c.code != 0 && status.Status().Code != c.code ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s %+v: %v, want %d with %q", c.verb, c.path, c.body, err, c.code, c.want)
		}
	}
	if err := p.Call("cp1", "GET", api.PathClusterStatus, nil, nil); err != nil {
		t.Errorf("the status after the refused requests: %v", err)
	}
	// Another process cannot use the data directory while the replica runs.
	cfg := p.Members["cp1"].Config
	if _, err := recovery.Inspect(cfg.Dir()); !errors.Is(err, datadir.ErrInUse) ||
		!strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("inspecting the data of a running replica: %v", err)
	}
	if _, err := recovery.Restore(cfg.Dir(), p.Founded.Kubeconfig,
		recovery.RestoreOptions{Replace: true}); !errors.Is(err, datadir.ErrInUse) {
		t.Errorf("restoring over the data of a running replica: %v", err)
	}
	// Unauthenticated clients are refused. F34
	anonymous := p.RESTConfig("cp1")
	anonymous.CertData, anonymous.KeyData, anonymous.CertFile, anonymous.KeyFile = nil, nil, "", ""
	cs, err := kubernetes.NewForConfig(anonymous)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{api.PathClusterStatus, api.PathClusterBackup, api.PathClusterMembers} {
		if _, err := cs.RESTClient().Get().AbsPath(path).DoRaw(context.Background()); !apierrors.IsUnauthorized(err) &&
			!apierrors.IsForbidden(err) {
			t.Errorf("GET %s without credentials: %v", path, err)
		}
	}
}

// A restore of a backup gives a cluster with the same objects. Watches from resource versions
// before the restore are refused with status 410. F52
func TestBackupAndRestore(t *testing.T) {
	p := newPlane(t, 1, nil)
	old := p.PutConfigMap("cp1", "a")
	file := p.Backup("cp1")
	p.PutConfigMap("cp1", "after")
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(t.TempDir(), "damaged")
	raw[len(raw)/2] ^= 0x10
	if err := os.WriteFile(damaged, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	cfg.Advertise = "" // the data directory has the address
	for name, c := range map[string]struct {
		file string
		o    recovery.RestoreOptions
		want string
	}{
		"restore over existing data": {file, recovery.RestoreOptions{}, "--replace"},
		"restore of a damaged file":  {damaged, recovery.RestoreOptions{Replace: true}, damaged},
		"restore of a file that is not a backup": {p.Founded.Kubeconfig,
			recovery.RestoreOptions{Replace: true}, "backup"},
		"restore of a missing file": {file + "x", recovery.RestoreOptions{Replace: true}, "no such file"},
	} {
		if _, err := recovery.Restore(cfg.Dir(), c.file, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	p.Restart("cp1") // the refused restores have changed nothing
	p.CheckConfigMaps("cp1", "a", "after")
	p.StopReplica("cp1")

	r, err := recovery.Restore(cfg.Dir(), file, recovery.RestoreOptions{Replace: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.MovedTo); err != nil {
		t.Errorf("the previous data was not moved aside: %v", err)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "a")
	if _, err := p.Client("cp1").CoreV1().ConfigMaps("default").Get(context.Background(), "after",
		metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("reading an object from after the backup: %v, want not found", err)
	}
	w, err := p.Client("cp1").CoreV1().ConfigMaps("default").Watch(context.Background(),
		metav1.ListOptions{ResourceVersion: old.ResourceVersion})
	if err == nil {
		e := <-w.ResultChan()
		w.Stop()
		err = apierrors.FromObject(e.Object)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch from before the restore: %v, want 410", err)
	}

	// Another cluster restores the backup only with the option for that.
	other := p.NewConfig(2)
	q := &plane{servertest.EmptyPlane(t, p.Dir)}
	q.Cluster = p.Cluster
	if q.Founded, err = server.Init(other, p.Cluster, server.InitOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := recovery.Restore(other.Dir(), file, recovery.RestoreOptions{}); err == nil ||
		!strings.Contains(err.Error(), "--any-cluster") {
		t.Errorf("restoring a backup of another cluster: %v", err)
	}
	if _, err := recovery.Restore(other.Dir(), file, recovery.RestoreOptions{AnyCluster: true}); err == nil ||
		!strings.Contains(err.Error(), "--backup-keys") {
		t.Errorf("restoring a backup that is encrypted with the key of another cluster: %v", err)
	}
	sourceKeys := datadir.KeyFile(p.Members["cp1"].Config.DataDir)
	options := recovery.RestoreOptions{AnyCluster: true, BackupKeys: sourceKeys}
	if _, err := recovery.Restore(other.Dir(), file, options); err != nil {
		t.Fatal(err)
	}
	q.StartReplica(other)
	q.AwaitReady("cp2")
	q.CheckConfigMaps("cp2", "a")
	if s := q.ClusterStatus("cp2"); len(s.Members) != 1 || s.Leader != "cp2" || s.ID == p.ClusterStatus("cp1").ID {
		t.Errorf("the status of the other cluster is %+v", s)
	}
}

// The log store of a stopped replica can be converted, and the conversion is permanent. A start
// with another log store is refused.
func TestConvertLog(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.PutConfigMap("cp1", "a")
	p.StopReplica("cp1")
	cfg := p.Members["cp1"].Config
	for _, to := range []string{"wal", "bolt", "wal"} {
		var done, total uint64
		if err := recovery.ConvertLog(context.Background(), cfg.Dir(), to, func(d, n uint64) {
			done, total = d, n
		}); err != nil || done != total || total == 0 {
			t.Fatalf("converting to %s: %v, %d of %d entries", to, err, done, total)
		}
		if i, err := recovery.Inspect(cfg.Dir()); err != nil || string(i.Disk.LogStore) != to ||
			i.Disk.Owner != "cp1" || i.Members["cp1"] == "" {
			t.Errorf("after converting to %s: %v %+v", to, err, i)
		}
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "a")
	p.PutConfigMap("cp1", "b")
	p.StopReplica("cp1")
	cfg.Store.LogStore, cfg.Process.Log = "bolt", slog.New(slog.DiscardHandler)
	if err := server.Run(context.Background(), cfg); !errors.Is(err, disk.ErrLogStore) {
		t.Errorf("starting with bolt on a data directory with wal: %v", err)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "a", "b")
}

// When the quota is exceeded, new objects are refused with a reason, and the status has an alarm
// with a remedy. Deletions free space, including deletions that first set a deletion timestamp and
// wait for finalizers.
func TestQuota(t *testing.T) {
	p := newPlane(t, 1, func(c *server.Config) { c.Store.Quota = datadir.MinQuota })
	cs := p.Client("cp1").CoreV1().ConfigMaps("default")
	_, err := p.Client("cp1").CoreV1().Pods("default").Create(context.Background(), &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec:       v1.PodSpec{NodeName: "w1", Containers: []v1.Container{{Name: "c", Image: "c"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}
	if _, err := p.Client("cp1").CoordinationV1().Leases("default").Create(context.Background(), lease,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; err == nil && n < 200; n++ {
		_, err = cs.Create(context.Background(), &v1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d", n), Finalizers: []string{"example.com/hold"}},
			Data:       map[string]string{"d": strings.Repeat("x", 1000<<10)},
		}, metav1.CreateOptions{})
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code != http.StatusInsufficientStorage ||
		!strings.Contains(err.Error(), "only deletions") {
		t.Fatalf("after %d objects of one megabyte: %v", n, err)
	}
	s := p.ClusterStatus("cp1")
	if len(s.Alarms) != 1 || s.Alarms[0].Kind != "space" || s.Alarms[0].Remedy == "" || s.Alarms[0].Since == 0 {
		t.Errorf("alarms: %+v", s.Alarms)
	}
	updateWhenFull(t, p.Client("cp1"))
	for i := range n / 2 {
		name := fmt.Sprintf("c-%d", i)
		if err := cs.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatalf("deleting when the quota is exceeded: %v", err)
		}
		held, err := cs.Get(context.Background(), name, metav1.GetOptions{})
		if err != nil || held.DeletionTimestamp == nil {
			t.Fatalf("an object with a finalizer, deleted when the quota is exceeded: %v, %v", err,
				held.DeletionTimestamp)
		}
		if _, err := cs.Patch(context.Background(), name, types.MergePatchType,
			[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
			t.Fatalf("removing a finalizer when the quota is exceeded: %v", err)
		}
		if _, err := cs.Get(context.Background(), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Fatalf("an object whose last finalizer is removed: %v", err)
		}
	}
	servertest.Eventually(t, func() error {
		_, err := cs.Create(context.Background(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "again"}},
			metav1.CreateOptions{})
		return err
	})
	if s := p.ClusterStatus("cp1"); len(s.Alarms) != 0 {
		t.Errorf("after the deletions the alarm remains: %+v", s.Alarms)
	}
}

// updateWhenFull performs the updates of nodes and users that must succeed when the quota is
// exceeded. A Lease is renewed, the status of a pod is updated, and the pod is deleted: first with
// a grace period, then by its node.
func updateWhenFull(t *testing.T, cs *kubernetes.Clientset) {
	t.Helper()
	ctx := context.Background()
	leases, pods := cs.CoordinationV1().Leases("default"), cs.CoreV1().Pods("default")
	for i := range 100 {
		l, err := leases.Get(ctx, "w1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		now := metav1.NowMicro()
		l.Spec.RenewTime = &now
		if _, err := leases.Update(ctx, l, metav1.UpdateOptions{}); err != nil {
			t.Fatalf("renewal %d of a lease when the quota is exceeded: %v", i, err)
		}
	}
	pod, err := pods.Get(ctx, "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Phase = v1.PodRunning
	pod.Status.Conditions = append(pod.Status.Conditions,
		v1.PodCondition{Type: v1.PodReady, Status: v1.ConditionTrue, LastTransitionTime: metav1.Now()})
	if _, err := pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		t.Fatalf("a pod's status when the quota is exceeded: %v", err)
	}
	if err := pods.Delete(ctx, "p", metav1.DeleteOptions{}); err != nil {
		t.Fatalf("deleting a pod when the quota is exceeded: %v", err)
	}
	if pod, err := pods.Get(ctx, "p", metav1.GetOptions{}); err != nil || pod.DeletionTimestamp == nil ||
		*pod.DeletionGracePeriodSeconds == 0 {
		t.Fatalf("a running pod that was deleted: %v, %v", err, pod.DeletionTimestamp)
	}
	if err := pods.Delete(ctx, "p", *metav1.NewDeleteOptions(0)); err != nil {
		t.Fatal(err)
	}
	if _, err := pods.Get(ctx, "p", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("reading a pod that its node has deleted: %v", err)
	}
}
