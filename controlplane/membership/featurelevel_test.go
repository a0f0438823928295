package membership_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// previousReleaseLevel returns the level of a release that supports no feature level.
func previousReleaseLevel() *uint32 { return new(uint32) }

// The level of a cluster does not rise while a replica runs the previous release. When that replica
// is upgraded, under writes through all replicas and with a leader change, the level rises on all
// replicas. From then on they write the short form of managedFields. Later the previous release is
// refused at a join, at a start, and at a restore.
func TestFeatureLevelOfThreeReplicas(t *testing.T) {
	p := newPlane(t, 3, func(c *server.Config) { c.Membership.FeatureLevel = previousReleaseLevel() })
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{{"level stays with an old replica", p.testLevelHeld}, {"level rises under load", p.testLevelRaised},
		{"previous release is refused", p.testLevelRefused},
		{"downgrade during a key rotation is refused", p.testLevelDuringRotation},
		{"restore to the previous release is refused", p.testLevelRestored}} {
		if !t.Run(step.name, func(t *testing.T) { p.T = t; step.run(t) }) {
			return // each step starts from the state after the previous step
		}
	}
}

func (p *plane) testLevelHeld(t *testing.T) {
	for _, name := range []string{"cp1", "cp2"} { // an upgrade, one replica after the other
		p.upgradeReplica(name)
	}
	if err := p.Call("cp2", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp1"}, nil); err != nil &&
		!strings.Contains(err.Error(), "leads already") {
		t.Fatal(err)
	}
	// The leader has requested the levels while cp3 was a member, and has logged why it did not
	// raise the level.
	servertest.Eventually(t, func() error {
		for _, name := range []string{"cp1", "cp2"} {
			if strings.Contains(p.Members[name].Log.String(), "cp3 supports levels up to 0") {
				return nil
			}
		}
		return errors.New("no leader has logged that cp3 prevents a higher level")
	})
	s := p.ClusterStatus("cp2")
	levels := map[string]uint32{}
	for _, m := range s.Members {
		levels[m.Name] = m.FeatureLevel
	}
	if s.FeatureLevel != 0 || levels["cp1"] != datadir.FeatureLevel || levels["cp2"] != datadir.FeatureLevel ||
		levels["cp3"] != 0 {
		t.Errorf("the cluster has level %d, the members support %v", s.FeatureLevel, levels)
	}
	// cp3 would continue to sign with the previous key.
	if err := p.startRotation("cp1"); err == nil ||
		!strings.Contains(err.Error(), "a key rotation needs feature level 2, and the cluster is at level 0") {
		t.Errorf("a key rotation was started, error %v", err)
	}
	if rec := p.Keys("cp1").Rotation; rec != nil {
		t.Errorf("the refused rotation is recorded: %+v", rec)
	}
	p.createConfigMap("cp1", "long")
	if raw := p.readStoredForm(t, "long"); !strings.Contains(raw, longForm) || strings.Contains(raw, shortForm) {
		t.Errorf("a form that cp3 cannot read is stored: %q", raw)
	}
}

// startRotation starts the rotation of the service account key. The rotation then waits until the
// tokens that the previous key has signed have expired.
func (p *plane) startRotation(at string) error {
	return p.Call(at, "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)}, nil)
}

// A managedFields entry as protobuf: its fieldsType is field 6.
const longForm, shortForm = "\x32\x08FieldsV1", "\x32\x02K1"

// createConfigMap creates a ConfigMap with managed fields.
func (p *plane) createConfigMap(at, name string) {
	p.T.Helper()
	cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"k": "v"}}
	if _, err := p.Client(at).CoreV1().ConfigMaps("default").Create(context.Background(), cm,
		metav1.CreateOptions{}); err != nil {
		p.T.Fatal(err)
	}
}

// upgradeReplica restarts a replica of the previous release as a replica of this release.
func (p *plane) upgradeReplica(name string) {
	p.T.Helper()
	p.StopReplica(name)
	cfg := p.Members[name].Config
	cfg.Membership.FeatureLevel = nil
	p.StartReplica(cfg)
	p.AwaitReady(name)
}

// readStoredForm returns the stored value of a ConfigMap, from a backup.
func (p *plane) readStoredForm(t *testing.T, name string) string {
	t.Helper()
	keys, err := disk.LoadKeyring(datadir.KeyFile(p.Members["cp1"].Config.DataDir))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(p.Backup("cp1"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, raw, err := disk.ReadBackupValue(f, keys, "/registry/configmaps/default/"+name)
	if err != nil || raw == nil {
		t.Fatalf("%s in a backup: %v", name, err)
	}
	return string(raw)
}

func (p *plane) testLevelRaised(t *testing.T) {
	writers := startWriteLoad(t, p, "cp1", "cp2")
	writers.awaitWrites(20)
	p.upgradeReplica("cp3")
	writers.addWriter("cp3")
	leader := p.ClusterStatus("cp1").Leader
	if err := p.Call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{}, nil); err != nil {
		t.Fatalf("leadership transfer of %s: %v", leader, err)
	}
	servertest.Eventually(t, func() error {
		for name := range p.Members {
			if s := p.ClusterStatus(name); s.FeatureLevel != datadir.FeatureLevel || len(s.Alarms) > 0 {
				return fmt.Errorf("%s reports level %d and alarms %+v", name, s.FeatureLevel, s.Alarms)
			}
		}
		return nil
	})
	writers.awaitWrites(20)
	made := writers.stopWriters()
	t.Logf("%d objects were written during the upgrade", len(made))
	// Objects from before, during and after the rise of the level have the same content at each
	// replica.
	fields := map[string]map[string][]metav1.ManagedFieldsEntry{} // by replica and name
	for at := range p.Members {
		list, err := p.Client(at).CoreV1().ConfigMaps("default").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		fields[at] = map[string][]metav1.ManagedFieldsEntry{}
		for _, cm := range list.Items {
			fields[at][cm.Name] = cm.ManagedFields
		}
	}
	for _, name := range append(made, "long") {
		seen := fields["cp1"][name]
		for at := range p.Members {
			got := fields[at][name]
			if len(got) != 1 || got[0].FieldsType != "FieldsV1" || len(seen) != 1 ||
				got[0].Manager != seen[0].Manager || !slices.Equal(got[0].FieldsV1.Raw, seen[0].FieldsV1.Raw) {
				t.Fatalf("%s at %s has managedFields %v, but at cp1 %v", name, at, got, seen)
			}
		}
	}
	for at := range p.Members {
		p.createConfigMap(at, "short-"+at)
		if raw := p.readStoredForm(t, "short-"+at); !strings.Contains(raw, shortForm) ||
			strings.Contains(raw, longForm) {
			t.Errorf("%s still writes the long form: %q", at, raw)
		}
	}
	if raw := p.readStoredForm(t, "long"); !strings.Contains(raw, longForm) {
		t.Errorf("an object that was not updated has changed its stored form: %q", raw)
	}
}

func (p *plane) testLevelRefused(t *testing.T) {
	levelError := fmt.Sprintf("the cluster stores forms of feature level %d", datadir.FeatureLevel)
	old := p.NewConfig(4)
	old.Membership.FeatureLevel = previousReleaseLevel()
	err := server.Join(context.Background(), old, p.Founded.ControlPlaneToken,
		[]string{datadir.HostPort(servertest.Address(1), p.Cluster.FleetPort)})
	if err == nil || !strings.Contains(err.Error(), levelError) ||
		!strings.Contains(err.Error(), "install the release of the other replicas") {
		t.Errorf("joining with the previous release: %v", err)
	}
	// A replica that was enrolled with this release and downgraded before it is a member is refused
	// by the leader.
	p.Join(p.NewConfig(4))
	p.checkStartRefused(t, old, levelError, "install the release of the other replicas")
	if s := p.ClusterStatus("cp1"); len(s.Members) != 3 {
		t.Errorf("the refused replica changed the members: %+v", s.Members)
	}
	// A downgraded member is refused because of its level file, and without the file once it has
	// read the store.
	p.StopReplica("cp3")
	set := p.Members["cp3"].Config
	set.Membership.FeatureLevel = previousReleaseLevel()
	p.checkStartRefused(t, set, levelError, "start the release that the other replicas run")
	if err := os.Remove(filepath.Join(set.DataDir, datadir.LevelFile)); err != nil {
		t.Fatal(err)
	}
	p.checkStartRefused(t, set, levelError, "start the release that the other replicas run")
	if _, err := os.Stat(filepath.Join(set.DataDir, datadir.LevelFile)); err != nil {
		t.Errorf("the replica has not recorded the level of the store: %v", err)
	}
	p.Restart("cp3")
	p.CheckConfigMaps("cp3", "long", "short-cp1")
}

// testLevelDuringRotation checks that no replica can be downgraded to the previous release during a
// key rotation. That release would sign with the previous key, or would not trust the new key. This
// release continues the rotation. F51
func (p *plane) testLevelDuringRotation(t *testing.T) {
	if err := p.startRotation("cp1"); err != nil {
		t.Fatal(err)
	}
	awaitRotationWaits := func(at string) {
		servertest.Eventually(t, func() error {
			if rec := p.Keys(at).Rotation; rec == nil || rec.Step != string(rotation.Wait) {
				return fmt.Errorf("the rotation at %s is %+v, want step %s", at, rec, rotation.Wait)
			}
			return nil
		})
	}
	awaitRotationWaits("cp1")
	p.StopReplica("cp3")
	set := p.Members["cp3"].Config
	set.Membership.FeatureLevel = new(uint32(datadir.LevelRotation - 1))
	p.checkStartRefused(t, set, "and this release understands levels up to 1",
		"start the release that the other replicas run")
	p.Restart("cp3")
	awaitRotationWaits("cp3")
	if err := p.Call("cp2", "POST", api.PathClusterKeys, api.ClusterRotate{Force: true}, nil); err != nil {
		t.Fatal(err)
	}
	servertest.Eventually(t, func() error {
		all := p.Keys("cp3")
		if last := all.Rotation; last == nil || last.Kind != string(rotation.ServiceAccountKey) ||
			last.Step != string(rotation.Done) {
			return fmt.Errorf("the last rotation at cp3 is %+v, waiting for %q", last, all.Waiting)
		}
		for _, h := range all.Replicas {
			for _, k := range h.Keys {
				if k.Kind == all.Rotation.Kind && (k.Signs != all.Rotation.New || len(k.Believes) != 1) {
					return fmt.Errorf("%s has the key %+v, want the new key alone", h.Name, k)
				}
			}
		}
		return nil
	})
}

// checkStartRefused runs a replica, which must stop with ErrLevelTooHigh and an error that contains
// all texts.
func (p *plane) checkStartRefused(t *testing.T, c server.Config, texts ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), servertest.Patience)
	defer cancel()
	c.Process.Log = p.Members["cp1"].Config.Process.Log
	err := server.Run(ctx, c)
	if ctx.Err() != nil || !errors.Is(err, datadir.ErrLevelTooHigh) {
		t.Fatalf("%s stopped with %v, want %v", c.Name, err, datadir.ErrLevelTooHigh)
	}
	for _, s := range texts {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s stopped with %v, want an error with %q", c.Name, err, s)
		}
	}
}

func (p *plane) testLevelRestored(t *testing.T) {
	file := p.Backup("cp2")
	for name := range p.Members {
		p.StopReplica(name)
	}
	c := p.Members["cp1"].Config
	set := c
	set.Membership.FeatureLevel = previousReleaseLevel()
	if _, err := recovery.Restore(set.Dir(), file, recovery.RestoreOptions{Replace: true}); !errors.Is(err,
		datadir.ErrLevelTooHigh) {
		t.Errorf("the previous release restores a backup that it cannot read: %v", err)
	}
	if err := os.Remove(filepath.Join(c.DataDir, datadir.LevelFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := recovery.Restore(c.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	if err := set.Dir().CheckLevel(); !errors.Is(err, datadir.ErrLevelTooHigh) {
		t.Errorf("the data directory does not have the level of the restored backup: %v", err)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "long", "short-cp3")
	servertest.Eventually(t, func() error {
		if s := p.ClusterStatus("cp1"); s.FeatureLevel != datadir.FeatureLevel {
			return fmt.Errorf("after the restore the level is %d, want %d", s.FeatureLevel, datadir.FeatureLevel)
		}
		return nil
	})
}

// writeLoad creates ConfigMaps through several replicas until stopWriters is called.
type writeLoad struct {
	t       *testing.T
	p       *plane
	stop    chan struct{}
	wg      sync.WaitGroup
	written atomic.Int64

	mu    sync.Mutex
	names []string
}

func startWriteLoad(t *testing.T, p *plane, through ...string) *writeLoad {
	l := &writeLoad{t: t, p: p, stop: make(chan struct{})}
	for _, name := range through {
		l.addWriter(name)
	}
	t.Cleanup(func() { l.stopWriters() })
	return l
}

func (l *writeLoad) addWriter(through string) {
	cs := l.p.Client(through).CoreV1().ConfigMaps("default")
	l.wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-l.stop:
				return
			default:
			}
			cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", through, i)},
				Data: map[string]string{"k": "v"}}
			if _, err := cs.Create(context.Background(), cm, metav1.CreateOptions{}); err != nil {
				if apierrors.IsAlreadyExists(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err) ||
					apierrors.IsServerTimeout(err) {
					continue // the leader changed during the write
				}
				l.t.Errorf("writing through %s: %v", through, err)
				return
			}
			l.mu.Lock()
			l.names = append(l.names, cm.Name)
			l.mu.Unlock()
			l.written.Add(1)
		}
	})
}

// awaitWrites waits for a number of further writes.
func (l *writeLoad) awaitWrites(more int64) {
	l.t.Helper()
	want := l.written.Load() + more
	servertest.Eventually(l.t, func() error {
		if n := l.written.Load(); n < want {
			return fmt.Errorf("there are %d writes, want %d", n, want)
		}
		return nil
	})
}

// stopWriters stops the writers and returns the names of the created ConfigMaps.
func (l *writeLoad) stopWriters() []string {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.wg.Wait()
	return l.names
}
