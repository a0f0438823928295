package kctl

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"keelson.dev/keelson/controlplane/api"
)

var rewrite = flag.Bool("rewrite", false, "write the transcripts")

// aPlane answers as a control plane would.
type aPlane struct {
	status api.ClusterStatus
	backup []byte
	spoil  func(w http.ResponseWriter) // what goes wrong behind the bytes of a backup
}

func refuse(w http.ResponseWriter, code int32, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(code))
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: code,
		Message: message,
	})
}

// ServeHTTP implements http.Handler.
func (p *aPlane) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	reply := func(v any) { w.Header().Set("Content-Type", "application/json"); _ = json.NewEncoder(w).Encode(v) }
	switch call := r.Method + " " + r.URL.Path; {
	case call == "GET /cluster/status":
		reply(p.status)
	case call == "GET /api/v1/nodes":
		reply(v1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: []v1.Node{
			{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}, {ObjectMeta: metav1.ObjectMeta{Name: "w2"}}}})
	case call == "GET /cluster/members":
		reply(p.status.Members)
	case call == "DELETE /cluster/members/cp3":
		reply(map[string]string{"removed": "cp3"})
	case strings.HasPrefix(call, "DELETE /cluster/members/cp2"):
		refuse(w, 409, "raftstore: change would leave no majority: of the voters that would be left only 1 of 2 can "+
			"be reached: start cp3 again, or remove it first")
	case strings.HasPrefix(call, "DELETE /cluster/members/"):
		refuse(w, 404, `raftstore: no such member: "cp9" is not among cp1, cp2, cp3`)
	case call == "POST /cluster/step-down" && string(body) == `{"to":"cp2"}`:
		reply(api.ClusterStepDownResult{From: "cp1", To: "cp2"})
	case call == "POST /cluster/step-down" && string(body) == `{}`:
		reply(api.ClusterStepDownResult{From: "cp1", To: "cp3"})
	case call == "POST /cluster/step-down":
		refuse(w, 400, `replica "cp1" leads already`)
	case call == "POST /cluster/compact" && string(body) == `{"revision":0}`:
		reply(api.ClusterCompactResult{Compacted: 4211, HistoryBytes: 0})
	case call == "POST /cluster/compact":
		refuse(w, 400, "--revision 99999 is in the future: the store is at 4211")
	case call == "POST /cluster/backup":
		w.Header().Set("Trailer", api.HeaderBackupSum)
		_, _ = w.Write(p.backup)
		_ = http.NewResponseController(w).Flush()
		p.spoil(w)
	case call == "POST /cluster/backup/verify" && bytes.Equal(body, p.backup):
		reply(api.ClusterBackup{Cluster: "prod-0123456789abcdef", Revision: 4211, Created: 1700000000000, Keys: 1532,
			Bytes: 2 << 20, Format: 2})
	case call == "POST /cluster/backup/verify":
		refuse(w, 400, "raftstore: backup is corrupt: frame 3 at byte 4096")
	default:
		refuse(w, 403, fmt.Sprintf(`forbidden: User "donghyun" cannot %s path %q`,
			strings.ToLower(r.Method), r.URL.Path))
	}
}

func (p *aPlane) good(w http.ResponseWriter) {
	sum := sha256.Sum256(p.backup)
	w.Header().Set(api.HeaderBackupSum, hex.EncodeToString(sum[:]))
}

func newPlane() *aPlane {
	p := &aPlane{backup: append([]byte(api.BackupMagic), bytes.Repeat([]byte("state "), 3000)...)}
	p.spoil = p.good
	p.status = api.ClusterStatus{
		Cluster: "prod", ID: "prod-0123456789abcdef", Answered: "cp2", Leader: "cp1", Term: 7, CommitIndex: 9120,
		Revision: 4211, Compacted: 12, Keys: 1532, Bytes: 2 << 20, HistoryBytes: 18 << 20, Quota: 8 << 30,
		Alarms: []api.ClusterAlarm{},
		Members: []api.ClusterMember{
			{Name: "cp1", Address: "192.0.2.11:6445", Voter: true, Leader: true, Ready: "yes", Applied: 9120,
				Version: "v1", Disk: 70 << 20, Watchers: 41, FeatureLevel: 1},
			{Name: "cp2", Address: "192.0.2.12:6445", Voter: true, Ready: "yes", Applied: 9118, Lag: 2, Version: "v1",
				Disk: 69 << 20, Watchers: 3},
			{Name: "cp3", Address: "192.0.2.13:6445", Voter: true, Ready: "no: connection refused", Applied: 8000,
				Lag: 1120, Contact: 95000},
			{Name: "cp4", Address: "192.0.2.14:6445", Ready: "no: it has not been probed yet", Contact: -1},
		},
	}
	return p
}

// transcript runs verbs against a plane and writes down what a person sees.
func transcript(t *testing.T, p *aPlane, lines ...string) string {
	t.Helper()
	api := httptest.NewServer(p)
	defer api.Close()
	t.Chdir(t.TempDir())
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &api.URL
	none := filepath.Join(t.TempDir(), "none")
	if err := os.WriteFile(none, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	flags.KubeConfig = &none
	var out bytes.Buffer
	for _, line := range lines {
		fmt.Fprintf(&out, "$ kctl cluster %s\n", line)
		root := &cobra.Command{Use: "kctl", SilenceErrors: true, SilenceUsage: true}
		root.AddCommand(clusterCommand(cmdutil.NewFactory(flags),
			genericiooptions.IOStreams{In: strings.NewReader(""), Out: &out, ErrOut: &out}))
		root.SetOut(&out)
		root.SetArgs(append([]string{"cluster"}, strings.Fields(line)...))
		if c, err := root.ExecuteC(); err != nil {
			fmt.Fprintln(&out, commandErrorText(c, err))
		}
		fmt.Fprintln(&out)
	}
	return out.String()
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test ./kctl -rewrite writes it); got:\n%s", path, got)
	}
}

// What the verbs of a running cluster print, word by word.
func TestClusterVerbs(t *testing.T) {
	p := newPlane()
	var got string
	t.Run("verbs", func(t *testing.T) {
		got = transcript(t, p, "status", "member list", "member list -o json", "member list -o yaml",
			"member remove cp3", "member remove cp2", "member remove cp9", "member remove",
			"transfer-leader", "transfer-leader --to cp2", "step-down --to cp1", "compact", "compact --revision 99999",
			"compact --revision -1",
			"stauts", "member delete", "token", "token rename")
	})
	golden(t, "cluster.txt", got)

	p.status.Leader, p.status.Members[0].Leader, p.status.Quota = "", false, 20<<20
	p.status.Alarms = []api.ClusterAlarm{
		{Kind: "space", Since: 1700000000000, Message: "20.0 MiB of 20.0 MiB are used",
			Remedy: "delete what is not needed, then run 'kctl cluster compact'"},
		{Kind: "diverged", Member: "cp3", Since: 1700000001000,
			Message: "its state at revision 4000 is another one than the leader's", Remedy: "rebuild it"},
	}
	t.Run("alarms", func(t *testing.T) { got = transcript(t, p, "status") })
	golden(t, "alarms.txt", got)
}

// Every verb explains itself with an example.
func TestClusterHelp(t *testing.T) {
	c := clusterCommand(cmdutil.NewFactory(genericclioptions.NewConfigFlags(false)),
		genericiooptions.NewTestIOStreamsDiscard())
	all := append(c.Commands(), c)
	for len(all) > 0 {
		v := all[0]
		all = append(all[1:], v.Commands()...)
		if v.Short == "" || !strings.Contains(v.Example, v.Name()) {
			t.Errorf("%s: no short text, or no example of it: %q", v.CommandPath(), v.Example)
		}
	}
}

// A backup has its name only when all of it is there and right; what goes wrong leaves nothing.
func TestBackup(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(p *aPlane) func(http.ResponseWriter)
		want  string // "" = it succeeds
	}{
		"whole": {func(p *aPlane) func(http.ResponseWriter) { return p.good }, ""},
		"no checksum": {func(*aPlane) func(http.ResponseWriter) {
			return func(http.ResponseWriter) {}
		}, "its checksum is missing"},
		"broken off": {func(*aPlane) func(http.ResponseWriter) {
			return func(http.ResponseWriter) { panic(http.ErrAbortHandler) }
		}, "the backup was interrupted"},
		"damaged": {func(*aPlane) func(http.ResponseWriter) {
			return func(w http.ResponseWriter) { w.Header().Set(api.HeaderBackupSum, strings.Repeat("0", 64)) }
		}, "damaged in transit"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlane()
			p.spoil = c.spoil(p)
			got := transcript(t, p, "backup today")
			if ok := c.want == ""; strings.Contains(got, "kctl cluster backup:") == ok ||
				!strings.Contains(got, c.want) {
				t.Errorf("%s, want %q", got, c.want)
			}
			raw, err := os.ReadFile("today")
			if c.want == "" && !bytes.Equal(raw, p.backup) {
				t.Errorf("the file: %v, %d bytes", err, len(raw))
			}
			if c.want != "" && !os.IsNotExist(err) {
				t.Errorf("a backup that is none has its name: %v", err)
			}
			if _, err := os.Stat("today.partial"); !os.IsNotExist(err) {
				t.Errorf("left over: %v", err)
			}
			if info, err := os.Stat("today"); err == nil && info.Mode().Perm() != 0o600 {
				t.Errorf("mode %v: others can read the cluster's secrets", info.Mode())
			}
		})
	}
}

// A backup that cannot be taken leaves the one of yesterday.
func TestBackupKeepsTheLast(t *testing.T) {
	p := newPlane()
	got := transcript(t, p, "backup today")
	if raw, err := os.ReadFile("today"); err != nil || !bytes.Equal(raw, p.backup) {
		t.Fatalf("%v: %s", err, got)
	}
	whole := append([]byte(nil), p.backup...)
	p.backup, p.spoil = []byte("half"), func(http.ResponseWriter) { panic(http.ErrAbortHandler) }
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	got = transcript(t, p, "backup "+filepath.Join(dir, "today"), "backup /dev/null",
		"backup "+filepath.Join(dir, "missing/today"), "backup -")
	for _, want := range []string{"the backup was interrupted", "/dev/null is not a regular file",
		"no such file or directory"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in:\n%s", want, got)
		}
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "today")); err != nil || !bytes.Equal(raw, whole) {
		t.Errorf("the last backup: %v, %d bytes", err, len(raw))
	}
}

// Where the daemon's program is not installed, a replica verifies.
func TestVerifyAtServer(t *testing.T) {
	p := newPlane()
	got := transcript(t, p, "backup today", "backup verify today", "backup verify absent", "backup verify --help")
	damaged := append([]byte(nil), p.backup...)
	damaged[100] ^= 1
	if err := os.WriteFile("damaged", damaged, 0o600); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	got += transcript(t, p, "backup verify "+filepath.Join(dir, "damaged"))
	for _, want := range []string{
		"today: whole. Cluster prod-0123456789abcdef at revision 4211 of 2023-11-14T22:13:20Z, 1532 keys, " +
			"2.0 MiB, format 2",
		"open absent: no such file", "Verify that a backup is complete",
		"/damaged: raftstore: backup is corrupt: frame 3 at byte 4096",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in:\n%s", want, got)
		}
	}
}

// Without a leader the status says whether that will pass.
func TestStatusWithoutALeader(t *testing.T) {
	there, away, learner := api.ClusterMember{Voter: true, Version: "v1"}, api.ClusterMember{Voter: true},
		api.ClusterMember{Version: "v1"}
	for _, c := range []struct {
		members []api.ClusterMember
		want    string
	}{
		{[]api.ClusterMember{there, away, away, learner, learner},
			"of 3 voters 1 answer and 2 are needed: nothing can be written"},
		{[]api.ClusterMember{there, away}, "of 2 voters 1 answer and 2 are needed"},
		{[]api.ClusterMember{there, there, away}, "the replicas elect one"},
	} {
		if got := describeLostLeader(c.members); !strings.Contains(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.members, got, c.want)
		}
	}
}

// What replicas say of the backups that they make by themselves is one line; a replica of an older release says nothing.
func TestBackupsMade(t *testing.T) {
	now := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	members := []api.ClusterMember{
		{Name: "cp1", Backups: &api.ClusterMemberBackups{Last: now.Add(-3 * time.Hour).UnixMilli(),
			Next: now.Add(3 * time.Hour).UnixMilli()}},
		{Name: "cp2"},
		{Name: "cp3", Backups: &api.ClusterMemberBackups{Error: "no space left on device"}},
	}
	if have, want := describeBackups(members, now), "cp1 3h0m0s ago, next 2026-01-02T15:00:00Z; cp3 none yet"; have !=
		want {
		t.Errorf("it says %q, want %q", have, want)
	}
	if have := describeBackups(members[1:2], now); have != "" {
		t.Errorf("where no replica makes any it says %q", have)
	}
}
