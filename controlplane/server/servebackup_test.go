package server

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/raftstore/disk"
)

// F52: a backup that is served holds what the cluster held, object by object and at the same revisions, lets nobody of the
// cluster in, starts nothing, and leaves nothing behind; what a killed one has left goes at the next call.
func TestServeBackup(t *testing.T) {
	ctx := t.Context()
	p := newPlane(t, 1, nil)
	cs := p.client("cp1")
	if _, err := cs.CoreV1().Secrets("default").Create(ctx, &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "v"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	live := p.put("cp1", "kept")
	work := t.TempDir()
	file := filepath.Join(work, "keelson-backup-today") // a person's, in the folder of the trial
	if err := os.Rename(p.backup("cp1"), file); err != nil {
		t.Fatal(err)
	}
	p.put("cp1", "later")

	left, busy := filepath.Join(work, api.TrialPrefix+"1"), filepath.Join(work, api.TrialPrefix+"2")
	for _, dir := range []string{left, busy, filepath.Join(work, "keelson-other")} {
		if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/", filepath.Join(work, api.TrialPrefix+"3")); err != nil {
		t.Fatal(err)
	}
	held, err := os.Open(busy)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := syscall.Flock(int(held.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}

	o := recovery.ServeOptions{Path: file, WorkDir: work, Store: datadir.StoreOptions{Keys: datadir.KeyFile(p.members["cp1"].cfg.DataDir)}, Log: slog.New(slog.DiscardHandler), Version: "test"}
	stop := errors.New("seen enough")
	var s recovery.Served
	err = ServeBackup(ctx, o, func(got recovery.Served) error {
		s = got
		seenServed(t, p, live, s)
		return stop
	})
	if !errors.Is(err, stop) {
		t.Fatalf("serving ended: %v", err)
	}
	for path, there := range map[string]bool{s.Folder: false, left: false, busy: true, file: true, filepath.Join(work, "keelson-other"): true, filepath.Join(work, api.TrialPrefix+"3"): true} {
		if _, err := os.Lstat(path); (err == nil) != there {
			t.Errorf("%s afterwards: %v, want there %v", path, err, there)
		}
	}

	o.Store.Keys = ""
	if err := ServeBackup(ctx, o, func(recovery.Served) error { return nil }); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("without the key: %v", err)
	}
}

// seenServed looks at what is served of a backup of p in which live is.
func seenServed(t *testing.T, p *plane, live *v1.ConfigMap, s recovery.Served) {
	ctx := context.Background()
	info, err := os.Stat(s.Folder)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder has mode %v, error %v", info.Mode(), err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	got, err := cs.CoreV1().ConfigMaps(live.Namespace).Get(ctx, "kept", metav1.GetOptions{})
	if err != nil || !reflect.DeepEqual(got, live) {
		t.Errorf("served is %+v, error %v, want %+v", got, err, live)
	}
	if sec, err := cs.CoreV1().Secrets("default").Get(ctx, "s", metav1.GetOptions{}); err != nil || string(sec.Data["k"]) != "v" {
		t.Errorf("the Secret: %v, error %v", sec, err)
	}
	if _, err := cs.CoreV1().ConfigMaps(live.Namespace).Get(ctx, "later", metav1.GetOptions{}); err == nil {
		t.Error("it serves what was made after the backup")
	}
	all, err := cs.CoreV1().ConfigMaps("").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]api.ClusterBackupKind{}
	for _, k := range s.Backup.Kinds {
		kinds[resourceName(k)] = k
	}
	if n := kinds["configmaps"].Objects; n != len(all.Items) || n < 2 {
		t.Errorf("it tells of %d ConfigMaps and serves %d", n, len(all.Items))
	}
	if k, ok := kinds["cronjobs.batch"]; !ok || k.Objects != 0 || k.Version != "v1" {
		t.Errorf("of kinds of which there is nothing it says %+v", k)
	}
	raw, err := cs.RESTClient().Get().RequestURI(api.PathClusterStatus).Do(ctx).Raw()
	var status api.ClusterStatus
	if err = errors.Join(err, json.Unmarshal(raw, &status)); err != nil || status.Work == api.WorkBegun || status.Leader == "" {
		t.Errorf("its leader's work is %q, error %v: no controller may run", status.Work, err)
	}
	// Its keys are its own: nobody whom the cluster knows comes in.
	cfg.TLSClientConfig.CertData, cfg.TLSClientConfig.KeyData = p.rest("cp1").CertData, p.rest("cp1").KeyData
	if foreign, err := kubernetes.NewForConfig(cfg); err != nil {
		t.Fatal(err)
	} else if _, err := foreign.CoreV1().Secrets("default").List(ctx, metav1.ListOptions{}); err == nil {
		t.Error("an administrator of the cluster reads the served Secrets")
	}
}

func resourceName(k api.ClusterBackupKind) string {
	if k.Group == "" {
		return k.Resource
	}
	return k.Resource + "." + k.Group
}
