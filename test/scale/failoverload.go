package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv/loopback"
	"keelson.dev/keelson/test/testenv/stream"
)

const (
	failoverSpace = "failover"
	streamPace    = 25 * time.Millisecond // between two ReplicaSets of one pod each
)

// failoverLoad is what goes on while leaders die: applies and watches at every replica, and ReplicaSets of one pod each, so
// that controllers, scheduler and agents always have something to do.
type failoverLoad struct {
	*plane
	stream.Load
	parts  sync.WaitGroup
	agents []*failoverAgent
	pods   *podStream
	end    context.CancelFunc // of the ReplicaSets
}

func (l *failoverLoad) start(ctx context.Context, agents int) error {
	l.Load = stream.Load{Names: l.plane.Names(), Clients: map[string]kubernetes.Interface{}, Namespace: failoverSpace, Call: 20 * time.Second}
	for _, name := range l.Names {
		cs, err := l.client(name)
		if err != nil {
			return err
		}
		l.Clients[name] = cs
	}
	for i := range agents {
		l.agent(ctx, i)
	}
	cs := l.Clients[l.Names[0]]
	if err := namespace(ctx, cs, failoverSpace); err != nil {
		return err
	}
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		list, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		free := 0
		for i := range list.Items {
			if len(list.Items[i].Spec.Taints) == 0 {
				free++
			}
		}
		if free < agents {
			return fmt.Errorf("%d of %d nodes take pods", free, agents)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := l.Load.Start(ctx); err != nil {
		return err
	}
	made, end := context.WithCancel(ctx)
	l.end, l.pods = end, &podStream{load: l, acked: map[int]time.Time{}, seen: map[int]*[3]time.Time{}}
	l.pods.start(ctx, made)
	return nil
}

// wait returns when all have ended.
func (l *failoverLoad) wait() { l.Load.Wait(); l.parts.Wait() }

// failoverAgent is an agent, and when it had sessions with whom.
type failoverAgent struct {
	name string

	mu     sync.Mutex
	at     string
	opened time.Time
}

func (l *failoverLoad) agent(ctx context.Context, i int) {
	a := &failoverAgent{name: nodeName(i)}
	l.agents = append(l.agents, a)
	agent := loopback.Agent{Name: a.name, Token: l.Founded.NodeToken, Dir: filepath.Join(l.dir, "agents", a.name), Source: net.IPv4(127, 64, 0, byte(i+1)),
		Address: fmt.Sprintf("100.64.0.%d", i+1), CheckpointEvery: checkpointEvery, Log: slog.New(a)}
	for n := range l.Names {
		agent.Servers = append(agent.Servers, l.FleetAddress((i+n)%replicas))
	}
	l.parts.Go(func() { _ = agent.Run(ctx) }) // an agent that is missing is missed by the load
}

// Enabled implements slog.Handler.
func (a *failoverAgent) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

// WithAttrs implements slog.Handler.
func (a *failoverAgent) WithAttrs([]slog.Attr) slog.Handler { return a }

// WithGroup implements slog.Handler.
func (a *failoverAgent) WithGroup(string) slog.Handler { return a }

// Handle implements slog.Handler: it notes sessions.
func (a *failoverAgent) Handle(_ context.Context, r slog.Record) error {
	if r.Message != "session opened" {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.opened = r.Time
	r.Attrs(func(at slog.Attr) bool {
		if at.Key == "replica" {
			a.at = at.Value.String()
		}
		return true
	})
	return nil
}

// openedAfter is when its session was opened that began after the last one's replica had died.
func (a *failoverAgent) openedAfter(elected time.Time) (time.Time, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.opened, a.opened.After(elected)
}

// agentsAt are those with a session at a replica.
func (l *failoverLoad) agentsAt(replica string) (out []*failoverAgent) {
	for _, a := range l.agents {
		a.mu.Lock()
		if a.at == replica {
			out = append(out, a)
		}
		a.mu.Unlock()
	}
	return out
}

// podStream is ReplicaSets of one pod each, made one after the other, and when their pods were seen first, bound and running.
type podStream struct {
	load *failoverLoad

	mu    sync.Mutex
	acked map[int]time.Time // when the ReplicaSet's creation was answered
	seen  map[int]*[3]time.Time
}

// start watches until ctx ends, and makes ReplicaSets until made does.
func (s *podStream) start(ctx, made context.Context) {
	for _, name := range s.load.Names {
		s.load.parts.Go(func() { s.watch(ctx, s.load.Clients[name]) })
	}
	s.load.parts.Go(func() { s.make(made) })
}

func (s *podStream) make(ctx context.Context) {
	names, at := s.load.Names, 0
	const kept = 100
	for n := 0; wait.Delay(ctx, streamPace) == nil; n++ {
		d := deployment("s", 1)
		set := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("r%d", n)}, Spec: appsv1.ReplicaSetSpec{
			Replicas: d.Spec.Replicas, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"n": strconv.Itoa(n)}}, Template: d.Spec.Template}}
		set.Spec.Template.Labels = set.Spec.Selector.MatchLabels
		for ctx.Err() == nil {
			sets := s.load.Clients[names[at]].AppsV1().ReplicaSets(failoverSpace)
			_, err := sets.Create(ctx, set, metav1.CreateOptions{})
			if err == nil || apierrors.IsAlreadyExists(err) {
				s.mu.Lock()
				s.acked[n] = time.Now()
				s.mu.Unlock()
				if n >= kept {
					_ = sets.Delete(ctx, fmt.Sprintf("r%d", n-kept), metav1.DeleteOptions{}) // what stays costs little
				}
				break
			}
			at = (at + 1) % len(names)
		}
	}
}

// watch notes what a replica tells of pods; it begins again from now when the replica has died.
func (s *podStream) watch(ctx context.Context, cs kubernetes.Interface) {
	for ctx.Err() == nil {
		w, err := cs.CoreV1().Pods(failoverSpace).Watch(ctx, metav1.ListOptions{})
		if err != nil {
			_ = wait.Delay(ctx, 20*time.Millisecond)
			continue
		}
		for e := range w.ResultChan() {
			if p, ok := e.Object.(*v1.Pod); ok {
				s.note(p, time.Now())
			}
		}
		w.Stop()
	}
}

func (s *podStream) note(p *v1.Pod, now time.Time) {
	n, err := strconv.Atoi(p.Labels["n"])
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.seen[n]
	if at == nil {
		at = &[3]time.Time{}
		s.seen[n] = at
	}
	for i, is := range []bool{true, p.Spec.NodeName != "", p.Status.Phase == v1.PodRunning} {
		if is && at[i].IsZero() {
			at[i] = now
		}
	}
}

// after is when the first pod was made, bound and running whose ReplicaSet was made after a moment.
func (s *podStream) after(from time.Time) (first [3]time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, acked := range s.acked {
		if at := s.seen[n]; at != nil && acked.After(from) {
			for i, t := range at {
				if !t.IsZero() && (first[i].IsZero() || t.Before(first[i])) {
					first[i] = t
				}
			}
		}
	}
	return first, !first[0].IsZero() && !first[1].IsZero() && !first[2].IsZero()
}
