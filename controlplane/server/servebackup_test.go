package server_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/raftstore/disk"
)

// F52: a served backup has every object of the backup with its revision. It admits no user of the
// cluster, runs no controllers and leaves no files. The files of a killed process are removed by
// the next call.
func TestServeBackup(t *testing.T) {
	ctx := t.Context()
	p := newPlane(t, 1, nil)
	cs := p.Client("cp1")
	if _, err := cs.CoreV1().Secrets("default").Create(ctx,
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": "v"}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	live := p.PutConfigMap("cp1", "kept")
	work := t.TempDir()
	file := filepath.Join(work, "keelson-backup-today") // a user's file in the work directory
	if err := os.Rename(p.Backup("cp1"), file); err != nil {
		t.Fatal(err)
	}
	p.PutConfigMap("cp1", "later")

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

	o := recovery.ServeOptions{Path: file, WorkDir: work,
		Store: datadir.StoreOptions{Keys: datadir.KeyFile(p.Members["cp1"].Config.DataDir)},
		Log:   slog.New(slog.DiscardHandler), Version: "test"}
	stop := errors.New("seen enough")
	var s recovery.ServedBackup
	err = server.ServeBackup(ctx, o, func(got recovery.ServedBackup) error {
		s = got
		checkServed(t, p, live, s)
		return stop
	})
	if !errors.Is(err, stop) {
		t.Fatalf("serving stopped: %v", err)
	}
	for path, there := range map[string]bool{s.Folder: false, left: false, busy: true, file: true,
		filepath.Join(work, "keelson-other"): true, filepath.Join(work, api.TrialPrefix+"3"): true} {
		if _, err := os.Lstat(path); (err == nil) != there {
			t.Errorf("%s afterwards: %v, want there %v", path, err, there)
		}
	}

	o.Store.Keys = ""
	err = server.ServeBackup(ctx, o, func(recovery.ServedBackup) error { return nil })
	if !errors.Is(err, disk.ErrSealed) {
		t.Errorf("without the key: %v", err)
	}
}

// checkServed checks the served backup of p, which contains the ConfigMap live.
func checkServed(t *testing.T, p *plane, live *v1.ConfigMap, s recovery.ServedBackup) {
	ctx := context.Background()
	info, err := os.Stat(s.Folder)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory has mode %v, error %v", info.Mode(), err)
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
		t.Errorf("served %+v, error %v, want %+v", got, err, live)
	}
	if sec, err := cs.CoreV1().Secrets("default").Get(ctx, "s", metav1.GetOptions{}); err != nil ||
		string(sec.Data["k"]) != "v" {
		t.Errorf("the Secret: %v, error %v", sec, err)
	}
	if _, err := cs.CoreV1().ConfigMaps(live.Namespace).Get(ctx, "later", metav1.GetOptions{}); err == nil {
		t.Error("an object that was created after the backup is served")
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
		t.Errorf("the description has %d ConfigMaps, and %d are served", n, len(all.Items))
	}
	if k, ok := kinds["cronjobs.batch"]; !ok || k.Objects != 0 || k.Version != "v1" {
		t.Errorf("description of a kind without objects: %+v", k)
	}
	raw, err := cs.RESTClient().Get().RequestURI(api.PathClusterStatus).Do(ctx).Raw()
	var status api.ClusterStatus
	if err = errors.Join(err, json.Unmarshal(raw, &status)); err != nil || status.Work == api.WorkBegun ||
		status.Leader == "" {
		t.Errorf("the leader's work is %q, error %v, want no controllers", status.Work, err)
	}
	// It has its own keys: users of the cluster are rejected.
	cfg.TLSClientConfig.CertData, cfg.TLSClientConfig.KeyData = p.RESTConfig("cp1").CertData,
		p.RESTConfig("cp1").KeyData
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
