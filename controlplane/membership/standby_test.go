package membership_test

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
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// findMember returns the status of a member, as the replica at reports it.
func (p *plane) findMember(at, name string) (api.ClusterMember, bool) {
	p.T.Helper()
	s := p.ClusterStatus(at)
	i := slices.IndexFunc(s.Members, func(m api.ClusterMember) bool { return m.Name == name })
	if i < 0 {
		return api.ClusterMember{}, false
	}
	return s.Members[i], true
}

// findFollower returns a voter that is not the leader and is not cp1, which the tests query.
func (p *plane) findFollower() string {
	p.T.Helper()
	for _, m := range p.ClusterStatus("cp1").Members {
		if m.Voter && !m.Leader && m.Name != "cp1" {
			return m.Name
		}
	}
	p.T.Fatal("there is no follower besides cp1")
	return ""
}

// joinStandby joins cp4 as a standby, and waits until it is ready.
func (p *plane) joinStandby(change func(*server.Config)) server.Config {
	p.T.Helper()
	c := p.NewConfig(4)
	c.Membership.Standby = true
	change(&c)
	p.Join(c)
	p.StartReplica(c)
	p.AwaitReady(c.Name)
	return c
}

// A standby serves without a vote. When a voter does not respond for the limit, it is removed and
// the standby is promoted. No write fails meanwhile. When the removed replica starts again, it
// reports that and why it was removed, and does not disturb the cluster. F53
func TestStandbyReplacesDeadReplica(t *testing.T) {
	const replaceAfter = 6 * time.Second // on a busy machine a live replica may be silent for seconds
	setReplaceDeadAfter := func(c *server.Config) { c.Membership.ReplaceDeadAfter = replaceAfter }
	p := newPlane(t, 3, setReplaceDeadAfter)
	standby := p.joinStandby(setReplaceDeadAfter)
	if m, _ := p.findMember("cp1", "cp4"); m.Voter || !m.Standby || m.Ready != "yes" {
		t.Fatalf("the status of the standby is %+v", m)
	}
	p.PutConfigMap("cp4", "through-the-standby")
	p.CheckConfigMaps("cp4", "through-the-standby")
	p.CheckConfigMaps("cp1", "through-the-standby")

	dead := p.findFollower()
	ctx, cancel := context.WithCancel(context.Background())
	var wrote, failed atomic.Int64
	var first atomic.Pointer[error]
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for i := 0; ctx.Err() == nil; i++ {
			at := []string{"cp1", "cp4"}[i%2]
			_, err := p.Client(at).CoreV1().ConfigMaps("default").Create(context.Background(),
				&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("w", i)}}, metav1.CreateOptions{})
			if wrote.Add(1); err != nil {
				failed.Add(1)
				first.CompareAndSwap(nil, &err)
			}
		}
	}()
	p.StopReplica(dead)
	servertest.Eventually(t, func() error {
		s := p.ClusterStatus("cp4")
		_, there := p.findMember("cp4", dead)
		m, _ := p.findMember("cp4", "cp4")
		if there || !m.Voter || m.Standby || s.Autopilot == nil || len(s.Autopilot.Done) == 0 {
			return fmt.Errorf("the members are %+v, the autopilot reports %+v", s.Members, s.Autopilot)
		}
		if wrote.Load() < 20 {
			return fmt.Errorf("there are only %d writes", wrote.Load())
		}
		return nil
	})
	cancel()
	<-ended
	if err := first.Load(); err != nil {
		t.Errorf("of %d writes during the replacement, %d failed: %v", wrote.Load(), failed.Load(), *err)
	}
	servertest.Eventually(t, func() error { // the leader reports it after its next observation
		s := p.ClusterStatus("cp1")
		if s.Autopilot == nil || len(s.Autopilot.Done) == 0 {
			return fmt.Errorf("the autopilot reports no replacement: %+v", s.Autopilot)
		}
		if got := s.Autopilot.Done[0]; got.Dead != dead || got.Standby != "cp4" || got.At == 0 || len(s.Members) != 3 ||
			s.Autopilot.After != replaceAfter.Milliseconds() {
			t.Fatalf("the autopilot reports %+v", s.Autopilot)
		}
		return nil
	})
	servertest.Eventually(t, func() error {
		if _, err := os.Stat(filepath.Join(standby.DataDir, datadir.StandbyFile)); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the promoted standby still has the standby mark: %v", err)
		}
		return nil
	})
	p.checkReplacementReported(t, dead)
	p.checkRemovedReplicaRestarts(t, dead)
	p.checkDismissal(t, dead)
}

// checkDismissal confirms that the disk of the removed replica is wiped, and checks that the
// replica is no longer reported.
func (p *plane) checkDismissal(t *testing.T, dead string) {
	t.Helper()
	dismiss := func(q api.ClusterRotate) error { return p.Call("cp4", "POST", api.PathClusterKeys, q, nil) }
	if err := dismiss(api.ClusterRotate{Dismiss: "cp9"}); !apierrors.IsNotFound(err) ||
		!strings.Contains(err.Error(), `replica "cp9" is not among the removed replicas [`+dead+`]`) {
		t.Errorf("dismissing cp9, which was not removed: %v", err)
	}
	if err := dismiss(api.ClusterRotate{Dismiss: dead, Force: true}); !apierrors.IsBadRequest(err) {
		t.Errorf("dismiss together with force: %v", err)
	}
	if removed := p.Keys("cp1").Removed; len(removed) != 1 {
		t.Fatalf("after two refused dismissals the removed replicas are %+v", removed)
	}
	if err := dismiss(api.ClusterRotate{Dismiss: dead}); err != nil {
		t.Fatal(err)
	}
	if removed := p.Keys("cp1").Removed; len(removed) != 0 {
		t.Errorf("after the dismissal the removed replicas are %+v", removed)
	}
}

// checkReplacementReported checks the Event, the metrics, the record of the keys and the audit log
// of a replacement.
func (p *plane) checkReplacementReported(t *testing.T, dead string) {
	t.Helper()
	servertest.Eventually(t, func() error {
		events, err := p.Client("cp1").CoreV1().Events("default").List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if e.Reason == "ReplicaReplaced" && strings.Contains(e.Message,
				"cp4 has received the vote of the dead replica "+dead) {
				return nil
			}
		}
		return fmt.Errorf("none of %d Events reports the replacement", len(events.Items))
	})
	servertest.Eventually(t, func() error {
		// the leader of that time counts the replacement, and the current leader reports that it is
		// not blocked
		var all []string
		for name := range p.Members {
			var metrics string
			if name == dead {
				continue
			}
			if err := p.Call(name, "GET", "/metrics", nil, &metrics); err != nil {
				return err
			}
			all = append(all, metrics)
		}
		text := strings.Join(all, "\n")
		if replaced, free := strings.Count(text, "\nkeelson_autopilot_replacements_total 1\n"),
			strings.Count(text, "\nkeelson_autopilot_blocked 0\n"); replaced != 1 || free != 1 {
			return fmt.Errorf("%d replicas have counted the replacement, and %d report that they are not blocked, "+
				"want 1 and 1", replaced, free)
		}
		return nil
	})
	var keys api.ClusterKeys
	if err := p.Call("cp1", "GET", api.PathClusterKeys, nil, &keys); err != nil || len(keys.Removed) != 1 ||
		keys.Removed[0].Name != dead || len(keys.Removed[0].Kinds) != 5 {
		t.Errorf("the report about the keys of %s is %+v, error %v", dead, keys.Removed, err)
	}
	audited := false
	for _, m := range []string{"cp1", "cp2", "cp3", "cp4"} {
		raw, err := os.ReadFile(filepath.Join(p.Members[m].Config.DataDir, "audit", "audit.log"))
		audited = audited || err == nil && strings.Contains(string(raw), `"username":"keelson:autopilot"`) &&
			strings.Contains(string(raw), api.PathClusterMembers+"/"+dead)
	}
	if !audited {
		t.Errorf("no audit log has the removal of %s", dead)
	}
}

// checkRemovedReplicaRestarts starts the removed replica again. It checks that the replica logs its
// removal, is not ready, and does not request votes.
func (p *plane) checkRemovedReplicaRestarts(t *testing.T, dead string) {
	t.Helper()
	p.StartReplica(p.Members[dead].Config)
	want := fmt.Sprintf("replica %s was removed from the raft cluster at ", dead)
	servertest.Eventually(t, func() error {
		_, err := p.Client(dead).RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		if err == nil {
			t.Fatalf("the removed replica %s is ready", dead)
		}
		if !strings.Contains(p.Members[dead].Log.String(), want) {
			return fmt.Errorf("%s does not log that it was removed", dead)
		}
		return nil
	})
	text := p.Members[dead].Log.String()
	i := strings.Index(text, want)
	line, _, _ := strings.Cut(text[i:], "\n")
	for _, part := range []string{dead + " has not answered for ", " and is replaced by cp4", "stop it, move ",
		"join its machine to the cluster again"} {
		if !strings.Contains(line, part) {
			t.Errorf("the message %q does not contain %q", line, part)
		}
	}
	// A request for pre-votes does not disturb the cluster. The test does not check that the leader
	// remains the same, because on a busy machine leaders change without a reason.
	servertest.Eventually(t, func() error {
		if text = p.Members[dead].Log.String(); !strings.Contains(text, `"asking for pre-vote"`) {
			return fmt.Errorf("%s does not request pre-votes", dead)
		}
		return nil
	})
	if strings.Contains(text, `"asking for vote"`) {
		t.Errorf("the removed replica %s requests votes:\n%s", dead, text)
	}
	if after := p.ClusterStatus("cp1"); after.Leader == dead || len(after.Members) != 3 {
		t.Errorf("after the restart of %s, replica %s leads %d members", dead, after.Leader, len(after.Members))
	}
}

// Without ReplaceDeadAfter no voter is replaced. With it and without a standby, an alarm reports
// why the voter is not replaced. A standby that joins later is promoted. F53
func TestReasonForNoReplacement(t *testing.T) {
	// on a busy machine a live replica may be silent for seconds
	p := newPlane(t, 3, func(c *server.Config) { c.Membership.ReplaceDeadAfter = 6 * time.Second })
	dead := p.findFollower()
	servertest.Eventually(t, func() error { // after the first observation of the leader
		if s := p.ClusterStatus("cp1"); s.Autopilot == nil ||
			!strings.Contains(s.Autopilot.State, "every voter answers; there is no standby") {
			return fmt.Errorf("the autopilot reports %+v", s.Autopilot)
		}
		return nil
	})
	p.StopReplica(dead)
	servertest.Eventually(t, func() error {
		s := p.ClusterStatus("cp1")
		i := slices.IndexFunc(s.Alarms, func(a api.ClusterAlarm) bool { return a.Kind == "autopilot" })
		if i < 0 || !strings.Contains(s.Alarms[i].Message, dead+" has not answered for ") ||
			!strings.Contains(s.Alarms[i].Message, "there is no standby: run 'keelson-controlplane join --standby'") ||
			s.Alarms[i].Since == 0 {
			return fmt.Errorf("the alarms are %+v, the autopilot reports %+v", s.Alarms, s.Autopilot)
		}
		return nil
	})
	if _, there := p.findMember("cp1", dead); !there {
		t.Fatalf("%s was removed without a standby", dead)
	}
	p.joinStandby(func(*server.Config) {})
	servertest.Eventually(t, func() error {
		if m, _ := p.findMember("cp1", "cp4"); !m.Voter {
			return fmt.Errorf("the standby cp4 is not promoted: %+v", m)
		}
		return nil
	})
	if _, there := p.findMember("cp1", dead); there {
		t.Errorf("the dead replica %s is still a member", dead)
	}
	off := newPlane(t, 1, nil)
	if s := off.ClusterStatus("cp1"); s.Autopilot != nil {
		t.Errorf("without ReplaceDeadAfter the autopilot reports %+v", s.Autopilot)
	}
}
