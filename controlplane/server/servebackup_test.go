package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/controlplane/api"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/mvcc"
)

func TestPlaces(t *testing.T) {
	known := map[string]*api.Kind{}
	for _, k := range builtIn() {
		if k.Storage != nil {
			known[k.Storage.Prefix] = k
		}
	}
	for key, want := range map[string][3]string{
		"/registry/pods/default/a":                 {"/registry/pods/", "", "pods"},
		"/registry/namespaces/a":                   {"/registry/namespaces/", "", "namespaces"},
		"/registry/deployments/default/a":          {"/registry/deployments/", "apps", "deployments"},
		"/registry/shop.example/orders/default/a":  {"/registry/shop.example/orders/", "shop.example", "orders"},
		"/registry/shop.example/orders/a":          {"/registry/shop.example/orders/", "shop.example", "orders"},
		"/registry/keelson.dev/feature-level":      {"/registry/keelson.dev/", "", ""},
		"/registry/keelson.dev/reservations/ip/10": {"/registry/keelson.dev/", "", ""},
		"/registry/unheard/of/it":                  {"/registry/unheard/", "", ""},
		"/registry/":                               {"/registry//", "", ""},
		"":                                         {elsewhere, "", ""},
		"/else/where":                              {elsewhere, "", ""},
	} {
		place, group, resource := placeOf(key, known)
		if got := [3]string{place, group, resource}; got != want {
			t.Errorf("%q lies at %q, want %q", key, got, want)
		}
	}
}

// FuzzInspectBackup: whatever a file holds, saying what is in it takes no more room than the file has, and no panic.
func FuzzInspectBackup(f *testing.F) {
	var good bytes.Buffer
	if err := writeBackupOf(&good, map[string]string{"/registry/pods/default/a": "x", "/registry/a.b/c/d": "y", "/registry/keelson.dev/feature-level": `{"level":1}`}); err != nil {
		f.Fatal(err)
	}
	f.Add(good.Bytes())
	f.Add(good.Bytes()[:40])
	all := builtIn()
	f.Fuzz(func(t *testing.T, content []byte) {
		info, v, err := disk.ReadBackup(bytes.NewReader(content), nil)
		if err != nil {
			return
		}
		b := describeBackup(info, v, all)
		n := 0
		for _, k := range b.Kinds {
			n += k.Objects
		}
		if n != info.Keys || len(b.Kinds) > mostPlaces+1 {
			t.Errorf("%d objects of %d kinds, the file tells of %d keys", n, len(b.Kinds), info.Keys)
		}
	})
}

// The places that a file may make up are bounded, and what is beyond is counted all the same.
func TestManyPlaces(t *testing.T) {
	state := map[string]string{}
	for i := range mostPlaces + 50 {
		state[fmt.Sprintf("/registry/g%d.example/things/n", i)] = "v"
	}
	var file bytes.Buffer
	if err := writeBackupOf(&file, state); err != nil {
		t.Fatal(err)
	}
	info, v, err := disk.ReadBackup(&file, nil)
	if err != nil {
		t.Fatal(err)
	}
	b := describeBackup(info, v, builtIn())
	n := 0
	for _, k := range b.Kinds {
		n += k.Objects
	}
	if len(b.Kinds) != mostPlaces+1 || n != len(state) {
		t.Errorf("%d places with %d objects, want %d with %d", len(b.Kinds), n, mostPlaces+1, len(state))
	}
}

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

	o := ServeOptions{Path: file, WorkDir: work, Store: StoreOptions{Keys: KeyFile(p.members["cp1"].cfg.DataDir)}, Log: slog.New(slog.DiscardHandler), Version: "test"}
	stop := errors.New("seen enough")
	var s Served
	err = ServeBackup(ctx, o, func(got Served) error {
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
	if err := ServeBackup(ctx, o, func(Served) error { return nil }); !errors.Is(err, disk.ErrSealed) {
		t.Errorf("without the key: %v", err)
	}
}

// What a person may have put into the folder of trials stays there, whatever it is called, and so does the backup that a
// verb is about, wherever it lies.
func TestSweepServed(t *testing.T) {
	work := t.TempDir()
	for _, dir := range []string{"keelson-backup-march", "keelson-backup-20260401", api.TrialPrefix, api.TrialPrefix + "mine", api.TrialPrefix + "10", api.TrialPrefix + "11"} {
		if err := os.Mkdir(filepath.Join(work, dir), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(work, dir, "today"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"keelson-backup-today", "keelson-backup-1", api.TrialPrefix + "12", api.TrialPrefix + "13", api.TrialPrefix + "14.old"} {
		if err := os.WriteFile(filepath.Join(work, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(t.TempDir(), "today")
	if err := os.Symlink(filepath.Join(work, api.TrialPrefix+"12"), link); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ about, goes string }{
		{filepath.Join(work, api.TrialPrefix+"10", "today"), api.TrialPrefix + "11 " + api.TrialPrefix + "12 " + api.TrialPrefix + "13"},
		{link, api.TrialPrefix + "10"}, // its file is gone
	} {
		removed, err := SweepServed(work, c.about)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, path := range removed {
			names = append(names, filepath.Base(path))
		}
		if got := strings.Join(names, " "); got != c.goes {
			t.Errorf("beside %s went %q, want %q", c.about, got, c.goes)
		}
	}
	if err := os.WriteFile(filepath.Join(work, api.TrialPrefix+"12"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if removed, err := SweepServed(work, link); err != nil || len(removed) > 0 {
		t.Errorf("with the backup behind a link went %v, %v", removed, err)
	}
	for _, stays := range []string{"keelson-backup-march/today", "keelson-backup-20260401/today", "keelson-backup-today", "keelson-backup-1", api.TrialPrefix + "mine/today", api.TrialPrefix + "14.old"} {
		if _, err := os.Stat(filepath.Join(work, stays)); err != nil {
			t.Error(err)
		}
	}
}

// seenServed looks at what is served of a backup of p in which live is.
func seenServed(t *testing.T, p *plane, live *v1.ConfigMap, s Served) {
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

// writeBackupOf writes a backup in clear that holds a state.
func writeBackupOf(w io.Writer, state map[string]string) error {
	m := mvcc.New()
	for key, value := range state {
		p, err := mvcc.Proposal(raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(key, []byte(value))}})
		if err != nil {
			return err
		}
		m.Apply(mvcc.Entry{Term: 1, Command: &storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: []*storev1.Proposal{p}}}}})
	}
	return disk.WriteClearBackup(w, "ours", time.Now(), m.View())
}
