package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
)

// member is what a replica says of another.
func (p *plane) member(at, name string) (api.ClusterMember, bool) {
	p.t.Helper()
	s := p.status(at)
	i := slices.IndexFunc(s.Members, func(m api.ClusterMember) bool { return m.Name == name })
	if i < 0 {
		return api.ClusterMember{}, false
	}
	return s.Members[i], true
}

// follower is a voter that does not lead, and is not the one that the tests ask.
func (p *plane) follower() string {
	p.t.Helper()
	for _, m := range p.status("cp1").Members {
		if m.Voter && !m.Leader && m.Name != "cp1" {
			return m.Name
		}
	}
	p.t.Fatal("nobody follows")
	return ""
}

// standbyJoins makes cp4 a standby.
func (p *plane) standbyJoins(change func(*Config)) Config {
	p.t.Helper()
	c := p.config(4)
	c.Standby = true
	change(&c)
	p.join(c)
	p.start(c)
	p.ready(c.Name)
	return c
}

// A standby serves without a vote. When a voter is silent for long enough it goes and the standby has its vote; who writes
// meanwhile does not notice. The dead one, started again, hears that it was removed and why, and disturbs nobody. F53
func TestAStandbyTakesThePlaceOfADeadReplica(t *testing.T) {
	const after = 6 * time.Second // on a busy machine one that lives may be silent for seconds
	patience := func(c *Config) { c.ReplaceDeadAfter = after }
	p := newPlane(t, 3, patience)
	standby := p.standbyJoins(patience)
	if m, _ := p.member("cp1", "cp4"); m.Voter || !m.Standby || m.Ready != "yes" {
		t.Fatalf("the standby is %+v", m)
	}
	p.put("cp4", "through-the-standby")
	p.holds("cp4", "through-the-standby")
	p.holds("cp1", "through-the-standby")

	dead := p.follower()
	ctx, cancel := context.WithCancel(context.Background())
	var wrote, failed atomic.Int64
	var first atomic.Pointer[error]
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ctx.Err() == nil; i++ {
			at := []string{"cp1", "cp4"}[i%2]
			_, err := p.client(at).CoreV1().ConfigMaps("default").Create(context.Background(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("w", i)}}, metav1.CreateOptions{})
			if wrote.Add(1); err != nil {
				failed.Add(1)
				first.CompareAndSwap(nil, &err)
			}
		}
	}()
	p.stop(dead)
	eventually(t, func() error {
		s := p.status("cp4")
		_, there := p.member("cp4", dead)
		m, _ := p.member("cp4", "cp4")
		if there || !m.Voter || m.Standby || s.Autopilot == nil || len(s.Autopilot.Done) == 0 {
			return fmt.Errorf("members %+v, autopilot %+v", s.Members, s.Autopilot)
		}
		if wrote.Load() < 20 {
			return fmt.Errorf("%d writes", wrote.Load())
		}
		return nil
	})
	cancel()
	<-ended
	if err := first.Load(); err != nil {
		t.Errorf("of %d writes meanwhile %d failed: %v", wrote.Load(), failed.Load(), *err)
	}
	eventually(t, func() error { // a leader tells of it when it has looked around
		s := p.status("cp1")
		if s.Autopilot == nil || len(s.Autopilot.Done) == 0 {
			return fmt.Errorf("it tells of nothing: %+v", s.Autopilot)
		}
		if got := s.Autopilot.Done[0]; got.Dead != dead || got.Standby != "cp4" || got.At == 0 || len(s.Members) != 3 || s.Autopilot.After != after.Milliseconds() {
			t.Fatalf("it tells of %+v", s.Autopilot)
		}
		return nil
	})
	eventually(t, func() error {
		if _, err := os.Stat(filepath.Join(standby.DataDir, datadir.StandbyFile)); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the standby has a vote and waits for one still: %v", err)
		}
		return nil
	})
	p.tellsOfTheReplacement(t, dead)
	p.comesBack(t, dead)
	p.isDismissed(t, dead)
}

// A machine that was a voter once joins anew as a standby, and its log begins with the days when it had a vote: it is none by that. F53
func TestVotesOfFormerDays(t *testing.T) {
	var (
		former = []raftMember{{ID: "cp1", Voter: true}, {ID: "cp2", Voter: true}, {ID: "cp3", Voter: true}}
		now    = []raftMember{{ID: "cp1", Voter: true}, {ID: "cp2"}, {ID: "cp3", Voter: true}, {ID: "cp4", Voter: true}}
	)
	for _, c := range []struct {
		what     string
		members  []raftMember
		name     string
		caughtUp bool
		want     bool
	}{
		{"its log is at the days before", former, "cp2", false, false},
		{"it has all, and no vote", now, "cp2", true, false},
		{"it has all, and a vote", now, "cp4", true, true},
		{"it has been given a vote and knows of no leader", now, "cp4", false, false},
		{"it is no member", former, "cp4", true, false},
	} {
		if got := hasVote(c.members, c.name, c.caughtUp); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}

// isDismissed says of the dead one that its disk is wiped.
func (p *plane) isDismissed(t *testing.T, dead string) {
	t.Helper()
	dismiss := func(q api.ClusterRotate) error { return p.call("cp4", "POST", api.PathClusterKeys, q, nil) }
	if err := dismiss(api.ClusterRotate{Dismiss: "nobody"}); !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), `replica "nobody" is not among [`+dead+`]`) {
		t.Errorf("nobody of that name was removed: %v", err)
	}
	if err := dismiss(api.ClusterRotate{Dismiss: dead, Force: true}); !apierrors.IsBadRequest(err) {
		t.Errorf("dismiss and force: %v", err)
	}
	if told := p.keys("cp1").Removed; len(told) != 1 {
		t.Fatalf("what was refused has changed something: %+v", told)
	}
	if err := dismiss(api.ClusterRotate{Dismiss: dead}); err != nil {
		t.Fatal(err)
	}
	if told := p.keys("cp1").Removed; len(told) != 0 {
		t.Errorf("it is told of still: %+v", told)
	}
}

// tellsOfTheReplacement looks for the Event, the metric and the keys that the dead one has had.
func (p *plane) tellsOfTheReplacement(t *testing.T, dead string) {
	t.Helper()
	eventually(t, func() error {
		events, err := p.client("cp1").CoreV1().Events("default").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.Reason == "ReplicaReplaced" && strings.Contains(e.Message, "cp4 has the vote of "+dead) {
				return nil
			}
		}
		return fmt.Errorf("no Event tells of it among %d", len(events.Items))
	})
	eventually(t, func() error { // the one that led then tells of it, and the one that leads now of what it waits for
		var all []string
		for name := range p.members {
			var metrics string
			if name == dead {
				continue
			}
			if err := p.call(name, "GET", "/metrics", nil, &metrics); err != nil {
				return err
			}
			all = append(all, metrics)
		}
		text := strings.Join(all, "\n")
		if replaced, free := strings.Count(text, "\nkeelson_autopilot_replacements_total 1\n"), strings.Count(text, "\nkeelson_autopilot_blocked 0\n"); replaced != 1 || free != 1 {
			return fmt.Errorf("%d replicas have replaced one, and %d are free to", replaced, free)
		}
		return nil
	})
	var keys api.ClusterKeys
	if err := p.call("cp1", "GET", api.PathClusterKeys, nil, &keys); err != nil || len(keys.Removed) != 1 || keys.Removed[0].Name != dead || len(keys.Removed[0].Kinds) != 5 {
		t.Errorf("that %s has had the keys is not told: %+v, %v", dead, keys.Removed, err)
	}
	audited := false
	for _, m := range []string{"cp1", "cp2", "cp3", "cp4"} {
		raw, err := os.ReadFile(filepath.Join(p.members[m].cfg.DataDir, auditFolder, "audit.log"))
		audited = audited || err == nil && strings.Contains(string(raw), `"username":"`+pilotUser+`"`) && strings.Contains(string(raw), api.PathClusterMembers+"/"+dead)
	}
	if !audited {
		t.Error("no audit log tells of it")
	}
}

// comesBack starts the dead one again.
func (p *plane) comesBack(t *testing.T, dead string) {
	t.Helper()
	p.start(p.members[dead].cfg)
	want := fmt.Sprintf("replica %s was removed from the group at ", dead)
	eventually(t, func() error {
		_, err := p.client(dead).RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		if err == nil {
			t.Fatal("a replica that was removed is ready")
		}
		if !strings.Contains(p.members[dead].log.String(), want) {
			return errors.New("it does not say that it was removed")
		}
		return nil
	})
	text := p.members[dead].log.String()
	i := strings.Index(text, want)
	line, _, _ := strings.Cut(text[i:], "\n")
	for _, part := range []string{dead + " has not answered for ", " and is replaced by cp4", "stop it, set ", "let its machine join anew"} {
		if !strings.Contains(line, part) {
			t.Errorf("it says %q, without %q", line, part)
		}
	}
	// Whether there would be votes for it is a question that disturbs nobody. That leaders are the same may be asked of no machine
	// that is so busy that they lose each other by themselves.
	eventually(t, func() error {
		if text = p.members[dead].log.String(); !strings.Contains(text, `"asking for pre-vote"`) {
			return errors.New("it does not ask whether there would be votes for it")
		}
		return nil
	})
	if strings.Contains(text, `"asking for vote"`) {
		t.Errorf("%s, back, asks for votes:\n%s", dead, text)
	}
	if after := p.status("cp1"); after.Leader == dead || len(after.Members) != 3 {
		t.Errorf("with %s back %s leads %d members", dead, after.Leader, len(after.Members))
	}
}

// Without the setting nobody is replaced; with it and nobody to take the place, it is told why nothing is done. A standby that
// comes then is given the vote. F53
func TestWhyADeadReplicaIsNotReplaced(t *testing.T) {
	p := newPlane(t, 3, func(c *Config) { c.ReplaceDeadAfter = 6 * time.Second }) // on a busy machine one that lives may be silent for seconds
	dead := p.follower()
	eventually(t, func() error { // once the leader has looked around
		if s := p.status("cp1"); s.Autopilot == nil || !strings.Contains(s.Autopilot.State, "every voter answers; there is no standby") {
			return fmt.Errorf("it says %+v", s.Autopilot)
		}
		return nil
	})
	p.stop(dead)
	eventually(t, func() error {
		s := p.status("cp1")
		i := slices.IndexFunc(s.Alarms, func(a api.ClusterAlarm) bool { return a.Kind == "autopilot" })
		if i < 0 || !strings.Contains(s.Alarms[i].Message, dead+" has not answered for ") || !strings.Contains(s.Alarms[i].Message, "there is no standby: 'keelson-controlplane join --standby'") || s.Alarms[i].Since == 0 {
			return fmt.Errorf("alarms: %+v, autopilot: %+v", s.Alarms, s.Autopilot)
		}
		return nil
	})
	if _, there := p.member("cp1", dead); !there {
		t.Fatal("it was removed, and nobody takes its place")
	}
	p.standbyJoins(func(*Config) {})
	eventually(t, func() error {
		if m, _ := p.member("cp1", "cp4"); !m.Voter {
			return fmt.Errorf("cp4 is %+v", m)
		}
		return nil
	})
	if _, there := p.member("cp1", dead); there {
		t.Errorf("%s is a member still", dead)
	}
	off := newPlane(t, 1, nil)
	if s := off.status("cp1"); s.Autopilot != nil {
		t.Errorf("nobody has asked for it: %+v", s.Autopilot)
	}
}
