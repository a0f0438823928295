package server

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
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
)

func TestRaisedLevel(t *testing.T) {
	says := func(levels ...uint32) (out []replica.MemberLevel) {
		for i, l := range levels {
			out = append(out, replica.MemberLevel{ID: fmt.Sprint("cp", i+1), Level: l, Heard: true})
		}
		return out
	}
	silent := replica.MemberLevel{ID: "gone"}
	for _, c := range []struct {
		name     string
		now, own uint32
		members  []replica.MemberLevel
		to       uint32
		holding  string
	}{
		{"nobody is known", 0, 1, nil, 0, ""},
		{"alone", 0, 1, says(1), 1, ""},
		{"all understand it", 0, 1, says(1, 1, 1), 1, ""},
		{"one announces nothing", 0, 1, says(1, 1, 0), 0, "cp3 understands levels up to 0"},
		{"one does not answer", 0, 1, append(says(1, 1), silent), 0, "gone does not answer"},
		{"several hold it", 0, 2, append(says(2, 1, 0), silent), 0, "cp2 understands levels up to 1, cp3 understands levels up to 0, gone does not answer"},
		{"as far as the last", 0, 3, says(3, 2, 3), 2, "cp2 understands levels up to 2"},
		{"the others know more than the leader", 0, 1, says(1, 5, 5), 1, ""},
		{"it is there already", 1, 1, says(1, 1), 1, ""},
		{"it never falls: a member is older", 1, 2, says(2, 0), 1, "cp2 understands levels up to 0"},
		{"it never falls: a member is silent", 2, 2, append(says(2), silent), 2, "gone does not answer"},
		{"it never falls: the leader is older", 2, 1, says(1, 1), 2, ""},
		{"the silent first", 0, 2, append([]replica.MemberLevel{silent}, says(2, 2)...), 0, "gone does not answer"},
	} {
		if to, holding := raisedLevel(c.now, c.own, c.members); to != c.to || strings.Join(holding, ", ") != c.holding {
			t.Errorf("%s: %d %q, want %d %q", c.name, to, holding, c.to, c.holding)
		}
	}
}

func TestTooOldAlarm(t *testing.T) {
	s := api.ClusterStatus{FeatureLevel: 1, Members: []api.ClusterMember{
		{Name: "cp1", Version: "v2", FeatureLevel: 1}, {Name: "cp2", Version: "v1"}, {Name: "cp3"}, // cp3 does not answer
	}}
	alarms := tooOldAlarms(s)
	if len(alarms) != 1 || alarms[0].Member != "cp2" || alarms[0].Message != "cp2 runs release v1, which understands feature levels up to 0, "+
		"and forms of level 1 are stored" || !strings.Contains(alarms[0].Remedy, "install the release of the other replicas") {
		t.Errorf("%+v", alarms)
	}
	if s.FeatureLevel = 0; len(tooOldAlarms(s)) > 0 {
		t.Error("an alarm although everybody understands level 0")
	}
}

// before is a release that announces no level.
func before() *uint32 { return new(uint32) }

// A cluster whose last replica is of the release before stays where it is; when that one is exchanged, while all three
// take writes and the leader changes, the level rises everywhere, and short forms are written from then on. The release
// before is refused at each way in.
func TestFeatureLevelOfThreeReplicas(t *testing.T) {
	p := newPlane(t, 3, func(c *Config) { c.featureLevel = before() })
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{{"held back", p.testLevelHeld}, {"raised under load", p.testLevelRaised}, {"refused", p.testLevelRefused},
		{"set back in the midst of an exchange", p.testLevelInExchange}, {"restored", p.testLevelRestored}} {
		if !t.Run(step.name, func(t *testing.T) { p.t = t; step.run(t) }) {
			return // each begins with what the one before left
		}
	}
}

func (p *plane) testLevelHeld(t *testing.T) {
	for _, name := range []string{"cp1", "cp2"} { // an upgrade, one replica after the other
		p.exchange(name)
	}
	if err := p.call("cp2", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp1"}, nil); err != nil && !strings.Contains(err.Error(), "leads already") {
		t.Fatal(err)
	}
	// The leader has asked while cp3 was a member, and has said why it did not raise the level.
	eventually(t, func() error {
		for _, name := range []string{"cp1", "cp2"} {
			if strings.Contains(p.members[name].log.String(), "cp3 understands levels up to 0") {
				return nil
			}
		}
		return errors.New("no leader has said that cp3 holds the level back")
	})
	s := p.status("cp2")
	levels := map[string]uint32{}
	for _, m := range s.Members {
		levels[m.Name] = m.FeatureLevel
	}
	if s.FeatureLevel != 0 || levels["cp1"] != datadir.FeatureLevel || levels["cp2"] != datadir.FeatureLevel || levels["cp3"] != 0 {
		t.Errorf("level %d, understood %v", s.FeatureLevel, levels)
	}
	// cp3 would go on by the former key.
	if err := p.rotate("cp1"); err == nil || !strings.Contains(err.Error(), "an exchange of keys needs feature level 2, and the cluster is at level 0") {
		t.Errorf("an exchange of keys began: %v", err)
	}
	if rec := p.keys("cp1").Rotation; rec != nil {
		t.Errorf("the refused exchange is recorded: %+v", rec)
	}
	p.write("cp1", "long")
	if raw := p.storedForm(t, "long"); !strings.Contains(raw, longForm) || strings.Contains(raw, shortForm) {
		t.Errorf("a form that cp3 does not understand is stored: %q", raw)
	}
}

// rotate begins to exchange the service account key, which waits for what the former one has signed.
func (p *plane) rotate(at string) error {
	return p.call(at, "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)}, nil)
}

// A managedFields entry as protobuf: its fieldsType is field 6.
const longForm, shortForm = "\x32\x08FieldsV1", "\x32\x02K1"

// write makes a ConfigMap that has fields to manage.
func (p *plane) write(at, name string) {
	p.t.Helper()
	cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"k": "v"}}
	if _, err := p.client(at).CoreV1().ConfigMaps("default").Create(context.Background(), cm, metav1.CreateOptions{}); err != nil {
		p.t.Fatal(err)
	}
}

// exchange starts a replica of the release before again, as one of this release.
func (p *plane) exchange(name string) {
	p.t.Helper()
	p.stop(name)
	cfg := p.members[name].cfg
	cfg.featureLevel = nil
	p.start(cfg)
	p.ready(name)
}

// storedForm is what is stored of a ConfigMap, out of a backup.
func (p *plane) storedForm(t *testing.T, name string) string {
	t.Helper()
	keys, err := disk.LoadKeyring(datadir.KeyFile(p.members["cp1"].cfg.DataDir))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(p.backup("cp1"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, raw, err := disk.FromBackup(f, keys, "/registry/configmaps/default/"+name)
	if err != nil || raw == nil {
		t.Fatalf("%s in a backup: %v", name, err)
	}
	return string(raw)
}

func (p *plane) testLevelRaised(t *testing.T) {
	writers := newLoad(t, p, "cp1", "cp2")
	writers.await(20)
	p.exchange("cp3")
	writers.add("cp3")
	leader := p.status("cp1").Leader
	if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{}, nil); err != nil {
		t.Fatalf("%s stepping down: %v", leader, err)
	}
	eventually(t, func() error {
		for name := range p.members {
			if s := p.status(name); s.FeatureLevel != datadir.FeatureLevel || len(s.Alarms) > 0 {
				return fmt.Errorf("%s says level %d, alarms %+v", name, s.FeatureLevel, s.Alarms)
			}
		}
		return nil
	})
	writers.await(20)
	made := writers.end()
	t.Logf("%d objects were written meanwhile", len(made))
	// What was written before, while and after the level rose reads the same at each replica.
	fields := map[string]map[string][]metav1.ManagedFieldsEntry{} // by replica and name
	for at := range p.members {
		list, err := p.client(at).CoreV1().ConfigMaps("default").List(context.Background(), metav1.ListOptions{})
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
		for at := range p.members {
			got := fields[at][name]
			if len(got) != 1 || got[0].FieldsType != "FieldsV1" || len(seen) != 1 || got[0].Manager != seen[0].Manager || !slices.Equal(got[0].FieldsV1.Raw, seen[0].FieldsV1.Raw) {
				t.Fatalf("%s at %s: managedFields %v, elsewhere %v", name, at, got, seen)
			}
		}
	}
	for at := range p.members {
		p.write(at, "short-"+at)
		if raw := p.storedForm(t, "short-"+at); !strings.Contains(raw, shortForm) || strings.Contains(raw, longForm) {
			t.Errorf("%s writes the long form still: %q", at, raw)
		}
	}
	if raw := p.storedForm(t, "long"); !strings.Contains(raw, longForm) {
		t.Errorf("what nobody has written anew has changed: %q", raw)
	}
}

func (p *plane) testLevelRefused(t *testing.T) {
	sentence := fmt.Sprintf("the cluster stores forms of feature level %d", datadir.FeatureLevel)
	old := p.config(4)
	old.featureLevel = before()
	err := Join(context.Background(), old, p.founded.ControlPlaneToken, []string{datadir.HostPort(address(1), p.cluster.FleetPort)})
	if err == nil || !strings.Contains(err.Error(), sentence) || !strings.Contains(err.Error(), "install the release of the other replicas") {
		t.Errorf("joining: %v", err)
	}
	// It was enrolled by a newer release and set back before it was a member: the leader does not take it in.
	p.join(p.config(4))
	p.ends(t, old, sentence, "install the release of the other replicas")
	if s := p.status("cp1"); len(s.Members) != 3 {
		t.Errorf("members: %+v", s.Members)
	}
	// A member that is set back: its own folder says so; without that the store does, once it is read.
	p.stop("cp3")
	set := p.members["cp3"].cfg
	set.featureLevel = before()
	p.ends(t, set, sentence, "start the release that the other replicas run")
	if err := os.Remove(filepath.Join(set.DataDir, datadir.LevelFile)); err != nil {
		t.Fatal(err)
	}
	p.ends(t, set, sentence, "start the release that the other replicas run")
	if _, err := os.Stat(filepath.Join(set.DataDir, datadir.LevelFile)); err != nil {
		t.Errorf("it has not kept what it found: %v", err)
	}
	p.again("cp3")
	p.holds("cp3", "long", "short-cp1")
}

// In the midst of an exchange of keys nobody can be set back to the release before: it would sign by the former key, or
// not believe the new one. The release of now goes on with it. F51
func (p *plane) testLevelInExchange(t *testing.T) {
	if err := p.rotate("cp1"); err != nil {
		t.Fatal(err)
	}
	wait := func(at string) {
		eventually(t, func() error {
			if rec := p.keys(at).Rotation; rec == nil || rec.Step != string(rotation.Wait) {
				return fmt.Errorf("%+v", rec)
			}
			return nil
		})
	}
	wait("cp1")
	p.stop("cp3")
	set := p.members["cp3"].cfg
	set.featureLevel = new(uint32(datadir.LevelRotation - 1))
	p.ends(t, set, "and this release understands levels up to 1", "start the release that the other replicas run")
	p.again("cp3")
	wait("cp3")
	if err := p.call("cp2", "POST", api.PathClusterKeys, api.ClusterRotate{Force: true}, nil); err != nil {
		t.Fatal(err)
	}
	p.rotated(t, "cp3", rotation.ServiceAccountKey)
}

// ends runs a replica, which must end by itself with an error that says all this.
func (p *plane) ends(t *testing.T, c Config, says ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	c.Log = p.members["cp1"].cfg.Log
	err := Run(ctx, c)
	if ctx.Err() != nil || !errors.Is(err, datadir.ErrLevelTooHigh) {
		t.Fatalf("%s: %v", c.Name, err)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %v, want %q", c.Name, err, s)
		}
	}
}

func (p *plane) testLevelRestored(t *testing.T) {
	file := p.backup("cp2")
	for name := range p.members {
		p.stop(name)
	}
	c := p.members["cp1"].cfg
	set := c
	set.featureLevel = before()
	if _, err := recovery.Restore(set.Dir(), file, recovery.RestoreOptions{Replace: true}); !errors.Is(err, datadir.ErrLevelTooHigh) {
		t.Errorf("the release before restores what it does not understand: %v", err)
	}
	if err := os.Remove(filepath.Join(c.DataDir, datadir.LevelFile)); err != nil {
		t.Fatal(err)
	}
	if _, err := recovery.Restore(c.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	if err := set.Dir().CheckLevel(); !errors.Is(err, datadir.ErrLevelTooHigh) {
		t.Errorf("the folder does not say what was restored: %v", err)
	}
	p.again("cp1")
	p.holds("cp1", "long", "short-cp3")
	eventually(t, func() error {
		if s := p.status("cp1"); s.FeatureLevel != datadir.FeatureLevel {
			return fmt.Errorf("level %d", s.FeatureLevel)
		}
		return nil
	})
}

// load makes ConfigMaps through several replicas until it is ended.
type load struct {
	t    *testing.T
	p    *plane
	stop chan struct{}
	wg   sync.WaitGroup
	n    atomic.Int64

	mu   sync.Mutex
	made []string
}

func newLoad(t *testing.T, p *plane, through ...string) *load {
	l := &load{t: t, p: p, stop: make(chan struct{})}
	for _, name := range through {
		l.add(name)
	}
	t.Cleanup(func() { l.end() })
	return l
}

func (l *load) add(through string) {
	cs := l.p.client(through).CoreV1().ConfigMaps("default")
	l.wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-l.stop:
				return
			default:
			}
			cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", through, i)}, Data: map[string]string{"k": "v"}}
			if _, err := cs.Create(context.Background(), cm, metav1.CreateOptions{}); err != nil {
				if apierrors.IsAlreadyExists(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) {
					continue // a leader went in the middle
				}
				l.t.Errorf("writing through %s: %v", through, err)
				return
			}
			l.mu.Lock()
			l.made = append(l.made, cm.Name)
			l.mu.Unlock()
			l.n.Add(1)
		}
	})
}

// await waits for so many writes more.
func (l *load) await(more int64) {
	l.t.Helper()
	want := l.n.Load() + more
	eventually(l.t, func() error {
		if n := l.n.Load(); n < want {
			return fmt.Errorf("%d writes of %d", n, want)
		}
		return nil
	})
}

// end stops the writers and returns what they made.
func (l *load) end() []string {
	l.mu.Lock()
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.mu.Unlock()
	l.wg.Wait()
	return l.made
}
