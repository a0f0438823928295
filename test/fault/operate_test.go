package fault

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv"
)

// The tests below are about what an operator does to the store. They come last:
// some of them make a new group of the replicas.

func status(t *testing.T) (s api.ClusterStatus, err error) {
	t.Helper()
	out, err := kctl(t, "cluster", "status", "-o", "json")
	if err != nil {
		return s, fmt.Errorf("%w: %s", err, out)
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// voters waits until all replicas of the lab are voters that keep up.
func voters(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		s, err := status(t)
		if err != nil {
			return err
		}
		up := 0
		for _, m := range s.Members {
			if m.Voter && m.Ready == "yes" && m.Lag < 100 {
				up++
			}
		}
		if up != 3 || len(s.Members) != 3 {
			return fmt.Errorf("%+v", s.Members)
		}
		return nil
	})
}

// offline runs a verb of the daemon's program on a replica's host.
func offline(t *testing.T, host string, args ...string) (string, error) {
	t.Helper()
	program := filepath.Join(testenv.Lab().Config.BinDir, "keelson-controlplane")
	args = append([]string{program, args[0], "--name=" + host}, args[1:]...)
	out, err := testenv.Host(t, host).Command(context.Background(), args...).CombinedOutput()
	t.Logf("%s: %s\n%s", host, strings.Join(args[1:], " "), out)
	return string(out), err
}

func mustOffline(t *testing.T, host string, args ...string) string {
	t.Helper()
	out, err := offline(t, host, args...)
	if err != nil {
		t.Fatalf("%s on %s: %v", args[0], host, err)
	}
	return out
}

func mustLab(t *testing.T, do func(context.Context, string) error, hosts ...string) {
	t.Helper()
	for _, h := range hosts {
		if err := do(context.Background(), h); err != nil {
			t.Fatal(err)
		}
	}
}

// dataDir is a replica's data folder as this machine sees it.
func dataDir(t *testing.T, host string) string {
	return filepath.Join(filepath.Dir(testenv.Host(t, host).LogFile()), "lib", "controlplane")
}

func configMap(t *testing.T, cs kubernetes.Interface, ns, name string) *v1.ConfigMap {
	t.Helper()
	cm, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return cm
}

// writers create objects without a pause, one after the other each, until end.
type writers struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	acked  []acknowledged
	failed []error
}

// write begins with a writer at each of the replicas named.
func write(t *testing.T, ns string, replicas ...string) *writers {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	w := &writers{stop: stop}
	t.Cleanup(stop)
	for i, replica := range replicas {
		cs := testenv.ClientAt(t, replica)
		w.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				name := fmt.Sprintf("w-%d-%d", i, n)
				_, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				w.mu.Lock()
				if err != nil {
					w.failed = append(w.failed, fmt.Errorf("%s at %s: %w", name, replica, err))
				} else {
					w.acked = append(w.acked, acknowledged{name, time.Now()})
				}
				w.mu.Unlock()
			}
		})
	}
	return w
}

// sofar is what has been acknowledged until now.
func (w *writers) sofar() []acknowledged {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.acked)
}

// more waits for a number of further writes.
func (w *writers) more(t *testing.T, n int) {
	t.Helper()
	before := len(w.sofar())
	testenv.Eventually(t, soon, func() error {
		if now := len(w.sofar()); now < before+n {
			return fmt.Errorf("%d further writes, want %d", now-before, n)
		}
		return nil
	})
}

// end stops the writers. No call may have failed.
func (w *writers) end(t *testing.T) []acknowledged {
	t.Helper()
	w.stop()
	w.wg.Wait()
	if len(w.failed) > 0 {
		t.Errorf("%d calls failed; first: %v", len(w.failed), w.failed[0])
	}
	return w.acked
}

// Stepping down under writes fails no call. How long writes stand still is
// logged; the benchmark measures it.
func TestStepDownUnderWrites(t *testing.T) {
	ns := testenv.Namespace(t)
	w := write(t, ns, "cp1", "cp2", "cp3", "cp1")
	for round := range 4 {
		w.more(t, 100)
		was, others := leader(t)
		at, args := time.Now(), []string{"cluster", "step-down"}
		if round%2 == 1 {
			args = append(args, "--to", others[0])
		}
		out := testenv.Kctl(t, args...)
		if !strings.Contains(out, "after "+was) || round%2 == 1 && !strings.HasPrefix(out, others[0]+" leads") {
			t.Errorf("round %d: %s", round, out)
		}
		w.more(t, 50)
		t.Logf("%s; the longest time without a write was %s", strings.TrimSpace(out), longestGap(w.sofar(), at).Round(time.Millisecond))
	}
	acked := w.end(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		checkHolds(t, testenv.ClientAt(t, replica), ns, acked, replica)
	}
}

// The first status after the power of the leader was cut shows it as not ready, and says why.
func TestStatusOfAKilledLeader(t *testing.T) {
	voters(t)
	victim, others := leader(t)
	cs := testenv.ClientAt(t, others[0])
	status := func() (s api.ClusterStatus, err error) {
		raw, err := cs.CoreV1().RESTClient().Get().AbsPath(api.PathClusterStatus).DoRaw(context.Background())
		if err == nil {
			err = json.Unmarshal(raw, &s)
		}
		return s, err
	}
	testenv.Eventually(t, soon, func() error { // they ask each other once a second
		s, err := status()
		for _, m := range s.Members {
			if m.Contact < 0 {
				err = fmt.Errorf("%s was never heard", m.Name)
			}
		}
		return err
	})
	mustLab(t, testenv.Lab().Kill, victim)
	testenv.Eventually(t, soon, func() error { // for some milliseconds nobody leads, and the others say so
		s, err := status()
		for _, m := range s.Members {
			if m.Name == victim && m.Ready == "yes" {
				t.Errorf("%s was killed and is shown as ready", m.Name)
			}
			if m.Name != victim && m.Ready != "yes" {
				err = fmt.Errorf("%s was killed; %s is shown as ready: %s", victim, m.Name, m.Ready)
			}
			if m.Contact < 0 {
				t.Errorf("%s is shown as never heard", m.Name)
			}
		}
		return err
	})
	mustLab(t, testenv.Lab().Restart, victim)
	voters(t)
}

// Flipped bytes on a replica's disk: it refuses to start and names the file, and
// is rebuilt from the others; a replica that was removed comes back the same way.
// Writes go on all the while, and none fails.
func TestReplicaRebuilt(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.ClientAt(t, "cp1")
	folder := filepath.Join(dataDir(t, "cp2"), "raft")
	before := contents(t, folder)
	mark := configMap(t, cs, ns, "a-name-to-be-damaged-on-disk").Name
	testenv.Eventually(t, soon, func() error {
		_, err := testenv.ClientAt(t, "cp2").CoreV1().ConfigMaps(ns).Get(context.Background(), mark, metav1.GetOptions{})
		return err
	})
	mustLab(t, testenv.Lab().Stop, "cp2")
	damaged := spoil(t, folder, before)
	mustLab(t, testenv.Lab().Restart, "cp2")
	testenv.Eventually(t, soon, func() error { // it ends, and says why
		for _, s := range testenv.Lab().Status(context.Background()) {
			if s.Name == "cp2" && s.PID != 0 {
				return errors.New("it runs on damaged data")
			}
		}
		raw, err := os.ReadFile(testenv.Host(t, "cp2").LogFile())
		if err == nil && !names(string(raw[max(0, len(raw)-2000):]), damaged) {
			err = fmt.Errorf("it names none of %s", damaged)
		}
		return err
	})
	w := write(t, ns, "cp1", "cp1")
	if out, err := offline(t, "cp2", "inspect"); err == nil || !names(out, damaged) {
		t.Errorf("inspect of damaged data: %v", err)
	}
	mustOffline(t, "cp2", "rebuild")
	mustLab(t, testenv.Lab().Restart, "cp2")
	voters(t)
	w.more(t, 20)
	checkHolds(t, testenv.ClientAt(t, "cp2"), ns, append(w.sofar(), acknowledged{name: mark}), "cp2")

	testenv.Kctl(t, "cluster", "member", "remove", "cp3")
	mustLab(t, testenv.Lab().Stop, "cp3")
	testenv.Eventually(t, soon, func() error { // the first attempts may still be led to cp3
		out, err := kctl(t, "cluster", "member", "remove", "cp3")
		if err == nil || !strings.Contains(out, "no such member") {
			return fmt.Errorf("removed twice: %v %s", err, out)
		}
		return nil
	})
	mustOffline(t, "cp3", "rebuild", "--server=10.89.0.11")
	mustLab(t, testenv.Lab().Restart, "cp3")
	killedAsNewcomer(t, "cp3")
	voters(t)
	w.more(t, 20)
	checkHolds(t, testenv.ClientAt(t, "cp3"), ns, append(w.end(t), acknowledged{name: mark}), "cp3")
}

// killedAsNewcomer kills a replica when the group has just taken it in, before it knows that it has all that the group has, and starts it again.
func killedAsNewcomer(t *testing.T, host string) {
	t.Helper()
	// What it asks by gives way to the mark when it is taken in; the mark may be gone at the next look.
	asks, mark := filepath.Join(dataDir(t, host), "peers.json"), filepath.Join(dataDir(t, host), "newcomer.json")
	limited, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := wait.For(limited, time.Millisecond, func() error {
		if _, err := os.Stat(asks); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is there: %v", asks, err)
		}
		return nil
	}); err != nil {
		t.Fatalf("%s is not taken in: %v", host, err)
	}
	mustLab(t, testenv.Lab().KillDaemon, host)
	_, err := os.Stat(mark)
	t.Logf("%s was killed as a newcomer; it has caught up: %v", host, errors.Is(err, fs.ErrNotExist))
	mustLab(t, testenv.Lab().Restart, host)
}

// names says whether a text names one of the files.
func names(text string, files []string) bool {
	return slices.ContainsFunc(files, func(f string) bool { return strings.Contains(text, filepath.Base(f)) })
}

// contents reads the files of a folder.
func contents(t *testing.T, folder string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the daemon runs, and has removed it
		}
		out[path] = raw
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// spoil flips a bit of each file of a folder where it begins to differ from what it was before, and returns these
// files. What was written cannot be searched for: it is encrypted.
func spoil(t *testing.T, folder string, before map[string][]byte) (damaged []string) {
	t.Helper()
	for path, raw := range contents(t, folder) {
		was, i := before[path], 0
		for i < len(raw) && i < len(was) && raw[i] == was[i] {
			i++
		}
		if i == len(raw) || len(was) == 0 {
			continue
		}
		raw[i] ^= 0x04
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		damaged = append(damaged, path)
	}
	if len(damaged) == 0 {
		t.Fatalf("no file of %s has changed", folder)
	}
	return damaged
}

// Backup while serving, restore into a group of its own: the objects of the
// backup are there, and who remembers the time before is told to list again.
func TestBackupAndRestore(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.ClientAt(t, "cp1")
	kept := configMap(t, cs, ns, "kept")
	file := filepath.Join(dataDir(t, "cp1"), "backup")
	w := write(t, ns, "cp2", "cp3")
	w.more(t, 50)
	before := w.sofar()
	testenv.Kctl(t, "cluster", "backup", file)
	w.more(t, 10)
	w.end(t)
	t.Cleanup(func() { os.Remove(file) })
	if out := testenv.Kctl(t, "cluster", "backup", "verify", file); !strings.Contains(out, "whole") {
		t.Error(out)
	}
	late := configMap(t, cs, ns, "late")
	if out, err := offline(t, "cp1", "restore", "--replace", "/var/lib/keelson/controlplane/backup"); err == nil || !strings.Contains(out, "in use") {
		t.Errorf("restore beside a running daemon: %v", err)
	}
	eachReplica(t, testenv.Lab().Stop)
	mustOffline(t, "cp1", "restore", "--replace", "/var/lib/keelson/controlplane/backup")
	mustOffline(t, "cp2", "rebuild", "--server=10.89.0.11")
	mustOffline(t, "cp3", "rebuild", "--server=10.89.0.11")
	eachReplica(t, testenv.Lab().Restart)
	allReady(t)
	voters(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		cs := testenv.ClientAt(t, replica)
		checkHolds(t, cs, ns, append(before, acknowledged{name: kept.Name}), replica)
		if _, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), late.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: what was written after the backup: %v", replica, err)
		}
		for _, version := range []string{kept.ResourceVersion, late.ResourceVersion} {
			if err := watchFrom(cs, ns, version); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				t.Errorf("%s: a watch from version %s of before: %v, want 410", replica, version, err)
			}
		}
	}
	nodesReady(t, testenv.Client(t), map[string]v1.ConditionStatus{"w1": v1.ConditionTrue, "w2": v1.ConditionTrue, "w3": v1.ConditionTrue})
}

// watchFrom says how a watch from a version is refused.
func watchFrom(cs kubernetes.Interface, ns, version string) error {
	w, err := cs.CoreV1().ConfigMaps(ns).Watch(context.Background(), metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: ptr(int64(5))})
	if err != nil {
		return err
	}
	defer w.Stop()
	e, open := <-w.ResultChan()
	if !open {
		return errors.New("the watch began and ended")
	}
	return apierrors.FromObject(e.Object)
}

// Two of three disks lost: the third goes on alone, when told to, and new
// replicas join it.
func TestMajorityLost(t *testing.T) {
	ns := testenv.Namespace(t)
	kept := configMap(t, testenv.ClientAt(t, "cp1"), ns, "kept")
	testenv.Eventually(t, soon, func() error {
		_, err := testenv.ClientAt(t, "cp2").CoreV1().ConfigMaps(ns).Get(context.Background(), kept.Name, metav1.GetOptions{})
		return err
	})
	eachReplica(t, testenv.Lab().KillDaemon)
	for _, lost := range []string{"cp1", "cp3"} {
		if err := os.RemoveAll(dataDir(t, lost)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := offline(t, "cp2", "recover"); err == nil || !strings.Contains(out, "--unsafe-lost-majority") || !strings.Contains(out, "cp1, cp3") {
		t.Errorf("recover without the flag: %v", err)
	}
	mustOffline(t, "cp2", "recover", "--unsafe-lost-majority")
	mustLab(t, testenv.Lab().Restart, "cp2")
	cs := testenv.ClientAt(t, "cp2")
	testenv.Eventually(t, soon, func() error {
		_, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), kept.Name, metav1.GetOptions{})
		return err
	})
	configMap(t, cs, ns, "alone")
	var token string
	testenv.Eventually(t, soon, func() error { // the way in has to find the only one that serves
		out, err := kctl(t, "cluster", "token", "create", "--role", "controlplane", "--uses", "2")
		if token = strings.TrimSpace(out); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	for _, lost := range []string{"cp1", "cp3"} {
		mustOffline(t, lost, "join", "--advertise-address="+testenv.Host(t, lost).IP.String(), "--token="+token, "--server="+testenv.Host(t, "cp2").IP.String()+fmt.Sprintf(":%d", lab.FleetPort))
		mustLab(t, testenv.Lab().Restart, lost)
	}
	voters(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		checkHolds(t, testenv.ClientAt(t, replica), ns, []acknowledged{{name: "kept"}, {name: "alone"}}, replica)
	}
}
