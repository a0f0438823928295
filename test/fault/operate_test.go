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

// The tests below are about operations on the store. They come last: some of them create a new
// group from the replicas.

func clusterStatus(t *testing.T) (s api.ClusterStatus, err error) {
	t.Helper()
	out, err := runKctl(t, "cluster", "status", "-o", "json")
	if err != nil {
		return s, fmt.Errorf("%w: %s", err, out)
	}
	return s, json.Unmarshal([]byte(out), &s)
}

// awaitVoters waits until all replicas of the lab are voters that are up to date.
func awaitVoters(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		s, err := clusterStatus(t)
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

// runOffline runs a verb of keelson-controlplane on a replica's host.
func runOffline(t *testing.T, host string, args ...string) (string, error) {
	t.Helper()
	program := filepath.Join(testenv.Lab().Config.BinDir, "keelson-controlplane")
	args = append([]string{program, args[0], "--name=" + host}, args[1:]...)
	out, err := testenv.Host(t, host).Command(context.Background(), args...).CombinedOutput()
	t.Logf("%s: %s\n%s", host, strings.Join(args[1:], " "), out)
	return string(out), err
}

func mustRunOffline(t *testing.T, host string, args ...string) string {
	t.Helper()
	out, err := runOffline(t, host, args...)
	if err != nil {
		t.Fatalf("%s on %s: %v", args[0], host, err)
	}
	return out
}

func forHosts(t *testing.T, do func(context.Context, string) error, hosts ...string) {
	t.Helper()
	for _, h := range hosts {
		if err := do(context.Background(), h); err != nil {
			t.Fatal(err)
		}
	}
}

// dataDirOf returns the path of a replica's data folder on this machine.
func dataDirOf(t *testing.T, host string) string {
	return filepath.Join(filepath.Dir(testenv.Host(t, host).LogFile()), "lib", "controlplane")
}

func createConfigMap(t *testing.T, cs kubernetes.Interface, ns, name string) *v1.ConfigMap {
	t.Helper()
	cm, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(),
		&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return cm
}

// objectWriters create objects continuously, each one after the other, until stopAll.
type objectWriters struct {
	stop   context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	acked  []acknowledgedWrite
	failed []error
}

// startWriters starts one writer at each of the replicas.
func startWriters(t *testing.T, ns string, replicas ...string) *objectWriters {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	w := &objectWriters{stop: stop}
	t.Cleanup(stop)
	for i, replica := range replicas {
		cs := testenv.ClientAt(t, replica)
		w.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				name := fmt.Sprintf("w-%d-%d", i, n)
				_, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(),
					&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				w.mu.Lock()
				if err != nil {
					w.failed = append(w.failed, fmt.Errorf("%s at %s: %w", name, replica, err))
				} else {
					w.acked = append(w.acked, acknowledgedWrite{name, time.Now()})
				}
				w.mu.Unlock()
			}
		})
	}
	return w
}

// acknowledgedSoFar returns the writes acknowledged up to now.
func (w *objectWriters) acknowledgedSoFar() []acknowledgedWrite {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.acked)
}

// awaitMore waits for n further writes.
func (w *objectWriters) awaitMore(t *testing.T, n int) {
	t.Helper()
	before := len(w.acknowledgedSoFar())
	testenv.Eventually(t, soon, func() error {
		if now := len(w.acknowledgedSoFar()); now < before+n {
			return fmt.Errorf("%d further writes, want %d", now-before, n)
		}
		return nil
	})
}

// stopAll stops the writers. No call may have failed.
func (w *objectWriters) stopAll(t *testing.T) []acknowledgedWrite {
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
	w := startWriters(t, ns, "cp1", "cp2", "cp3", "cp1")
	for round := range 4 {
		w.awaitMore(t, 100)
		was, others := leaderAndOthers(t)
		at, args := time.Now(), []string{"cluster", "step-down"}
		if round%2 == 1 {
			args = append(args, "--to", others[0])
		}
		out := testenv.Kctl(t, args...)
		if !strings.Contains(out, "after "+was) || round%2 == 1 && !strings.HasPrefix(out, others[0]+" leads") {
			t.Errorf("round %d: %s", round, out)
		}
		w.awaitMore(t, 50)
		t.Logf("%s; the longest time without a write was %s", strings.TrimSpace(out),
			longestGap(w.acknowledgedSoFar(), at).Round(time.Millisecond))
	}
	acked := w.stopAll(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		requireWrites(t, testenv.ClientAt(t, replica), ns, acked, replica)
	}
}

// The first status after the leader's power was cut reports it as not ready, with the reason.
func TestStatusOfAKilledLeader(t *testing.T) {
	awaitVoters(t)
	victim, others := leaderAndOthers(t)
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
				err = fmt.Errorf("%s has never had contact", m.Name)
			}
		}
		return err
	})
	forHosts(t, testenv.Lab().Kill, victim)
	testenv.Eventually(t, soon, func() error {
		// for some milliseconds there is no leader, and the other replicas report that
		s, err := status()
		for _, m := range s.Members {
			if m.Name == victim && m.Ready == "yes" {
				t.Errorf("%s was killed and is shown as ready", m.Name)
			}
			if m.Name != victim && m.Ready != "yes" {
				err = fmt.Errorf("%s was killed; %s is shown as ready: %s", victim, m.Name, m.Ready)
			}
			if m.Contact < 0 {
				t.Errorf("%s is shown without any contact", m.Name)
			}
		}
		return err
	})
	forHosts(t, testenv.Lab().Restart, victim)
	awaitVoters(t)
}

// Flipped bytes on a replica's disk: the replica refuses to start, names the file, and is rebuilt
// from the others. A removed replica joins again in the same way. Writes continue meanwhile, and
// none fails.
func TestReplicaRebuilt(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.ClientAt(t, "cp1")
	folder := filepath.Join(dataDirOf(t, "cp2"), "raft")
	before := readFiles(t, folder)
	mark := createConfigMap(t, cs, ns, "a-name-to-be-damaged-on-disk").Name
	testenv.Eventually(t, soon, func() error {
		_, err := testenv.ClientAt(t, "cp2").CoreV1().ConfigMaps(ns).Get(context.Background(), mark,
			metav1.GetOptions{})
		return err
	})
	forHosts(t, testenv.Lab().Stop, "cp2")
	damaged := damageFiles(t, folder, before)
	forHosts(t, testenv.Lab().Restart, "cp2")
	testenv.Eventually(t, soon, func() error { // it exits and logs the reason
		for _, s := range testenv.Lab().Status(context.Background()) {
			if s.Name == "cp2" && s.PID != 0 {
				return errors.New("it runs on damaged data")
			}
		}
		raw, err := os.ReadFile(testenv.Host(t, "cp2").LogFile())
		if err == nil && !containsAny(string(raw[max(0, len(raw)-2000):]), damaged) {
			err = fmt.Errorf("the log names none of %s", damaged)
		}
		return err
	})
	w := startWriters(t, ns, "cp1", "cp1")
	if out, err := runOffline(t, "cp2", "inspect"); err == nil || !containsAny(out, damaged) {
		t.Errorf("inspect of damaged data: %v", err)
	}
	mustRunOffline(t, "cp2", "rebuild")
	forHosts(t, testenv.Lab().Restart, "cp2")
	awaitVoters(t)
	w.awaitMore(t, 20)
	requireWrites(t, testenv.ClientAt(t, "cp2"), ns, append(w.acknowledgedSoFar(), acknowledgedWrite{name: mark}),
		"cp2")

	testenv.Kctl(t, "cluster", "member", "remove", "cp3")
	forHosts(t, testenv.Lab().Stop, "cp3")
	testenv.Eventually(t, soon, func() error { // the first attempts may still be led to cp3
		out, err := runKctl(t, "cluster", "member", "remove", "cp3")
		if err == nil || !strings.Contains(out, "no such member") {
			return fmt.Errorf("removed twice: %v %s", err, out)
		}
		return nil
	})
	mustRunOffline(t, "cp3", "rebuild", "--server=10.89.0.11")
	forHosts(t, testenv.Lab().Restart, "cp3")
	killJoiningReplica(t, "cp3")
	awaitVoters(t)
	w.awaitMore(t, 20)
	requireWrites(t, testenv.ClientAt(t, "cp3"), ns, append(w.stopAll(t), acknowledgedWrite{name: mark}), "cp3")
}

// killJoiningReplica kills a replica when it has just become a member, before it has received the
// complete state, and starts it again.
func killJoiningReplica(t *testing.T, host string) {
	t.Helper()
	// The file of peers is replaced by the mark when the replica is admitted; the mark may be gone
	// at the next check.
	asks, mark := filepath.Join(dataDirOf(t, host), "peers.json"), filepath.Join(dataDirOf(t, host), "newcomer.json")
	limited, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := wait.For(limited, time.Millisecond, func() error {
		if _, err := os.Stat(asks); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is there: %v", asks, err)
		}
		return nil
	}); err != nil {
		t.Fatalf("%s is not admitted: %v", host, err)
	}
	forHosts(t, testenv.Lab().KillDaemon, host)
	_, err := os.Stat(mark)
	t.Logf("%s was killed as a joining replica; it has caught up: %v", host, errors.Is(err, fs.ErrNotExist))
	forHosts(t, testenv.Lab().Restart, host)
}

// containsAny reports whether a text contains one of the file names.
func containsAny(text string, files []string) bool {
	return slices.ContainsFunc(files, func(f string) bool { return strings.Contains(text, filepath.Base(f)) })
}

// readFiles returns the contents of the files of a folder.
func readFiles(t *testing.T, folder string) map[string][]byte {
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

// damageFiles flips a bit in each file of a folder where its content first differs from its
// previous content, and returns these files. The written text cannot be searched for, because it is
// encrypted.
func damageFiles(t *testing.T, folder string, before map[string][]byte) (damaged []string) {
	t.Helper()
	for path, raw := range readFiles(t, folder) {
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

// Backup while serving, and restore into a new group: the objects of the backup exist, and clients
// with a later resource version are told to list again.
func TestBackupAndRestore(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.ClientAt(t, "cp1")
	kept := createConfigMap(t, cs, ns, "kept")
	file := filepath.Join(dataDirOf(t, "cp1"), "backup")
	w := startWriters(t, ns, "cp2", "cp3")
	w.awaitMore(t, 50)
	before := w.acknowledgedSoFar()
	testenv.Kctl(t, "cluster", "backup", file)
	w.awaitMore(t, 10)
	w.stopAll(t)
	t.Cleanup(func() { os.Remove(file) })
	if out := testenv.Kctl(t, "cluster", "backup", "verify", file); !strings.Contains(out, "whole") {
		t.Error(out)
	}
	late := createConfigMap(t, cs, ns, "late")
	if out, err := runOffline(t, "cp1", "restore", "--replace", "/var/lib/keelson/controlplane/backup"); err == nil ||
		!strings.Contains(out, "in use") {
		t.Errorf("restore beside a running daemon: %v", err)
	}
	forEachReplica(t, testenv.Lab().Stop)
	mustRunOffline(t, "cp1", "restore", "--replace", "/var/lib/keelson/controlplane/backup")
	mustRunOffline(t, "cp2", "rebuild", "--server=10.89.0.11")
	mustRunOffline(t, "cp3", "rebuild", "--server=10.89.0.11")
	forEachReplica(t, testenv.Lab().Restart)
	awaitReplicas(t)
	awaitVoters(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		cs := testenv.ClientAt(t, replica)
		requireWrites(t, cs, ns, append(before, acknowledgedWrite{name: kept.Name}), replica)
		if _, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), late.Name,
			metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: what was written after the backup: %v", replica, err)
		}
		for _, version := range []string{kept.ResourceVersion, late.ResourceVersion} {
			if err := watchError(cs, ns, version); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
				t.Errorf("%s: a watch from the previous version %s: %v, want 410", replica, version, err)
			}
		}
	}
	awaitNodes(t, testenv.Client(t), map[string]v1.ConditionStatus{"w1": v1.ConditionTrue, "w2": v1.ConditionTrue,
		"w3": v1.ConditionTrue})
}

// watchError returns the error of a watch that starts at a version.
func watchError(cs kubernetes.Interface, ns, version string) error {
	w, err := cs.CoreV1().ConfigMaps(ns).Watch(context.Background(),
		metav1.ListOptions{ResourceVersion: version, TimeoutSeconds: new(int64(5))})
	if err != nil {
		return err
	}
	defer w.Stop()
	e, open := <-w.ResultChan()
	if !open {
		return errors.New("the watch started and ended")
	}
	return apierrors.FromObject(e.Object)
}

// Two of three disks are lost: the third continues alone after recover, and new replicas join it.
func TestMajorityLost(t *testing.T) {
	ns := testenv.Namespace(t)
	kept := createConfigMap(t, testenv.ClientAt(t, "cp1"), ns, "kept")
	testenv.Eventually(t, soon, func() error {
		_, err := testenv.ClientAt(t, "cp2").CoreV1().ConfigMaps(ns).Get(context.Background(), kept.Name,
			metav1.GetOptions{})
		return err
	})
	forEachReplica(t, testenv.Lab().KillDaemon)
	for _, lost := range []string{"cp1", "cp3"} {
		if err := os.RemoveAll(dataDirOf(t, lost)); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := runOffline(t, "cp2", "recover"); err == nil || !strings.Contains(out, "--unsafe-lost-majority") ||
		!strings.Contains(out, "cp1, cp3") {
		t.Errorf("recover without the flag: %v", err)
	}
	mustRunOffline(t, "cp2", "recover", "--unsafe-lost-majority")
	forHosts(t, testenv.Lab().Restart, "cp2")
	cs := testenv.ClientAt(t, "cp2")
	testenv.Eventually(t, soon, func() error {
		_, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), kept.Name, metav1.GetOptions{})
		return err
	})
	createConfigMap(t, cs, ns, "alone")
	var token string
	testenv.Eventually(t, soon, func() error { // the forwarder has to find the only replica that serves
		out, err := runKctl(t, "cluster", "token", "create", "--role", "controlplane", "--uses", "2")
		if token = strings.TrimSpace(out); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	for _, lost := range []string{"cp1", "cp3"} {
		mustRunOffline(t, lost, "join", "--advertise-address="+testenv.Host(t, lost).IP.String(), "--token="+token,
			"--server="+testenv.Host(t, "cp2").IP.String()+fmt.Sprintf(":%d", lab.FleetPort))
		forHosts(t, testenv.Lab().Restart, lost)
	}
	awaitVoters(t)
	for _, replica := range []string{"cp1", "cp2", "cp3"} {
		requireWrites(t, testenv.ClientAt(t, replica), ns, []acknowledgedWrite{{name: "kept"}, {name: "alone"}},
			replica)
	}
}
