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
	failoverNamespace = "failover"
	streamPace        = 25 * time.Millisecond // between the creations of two ReplicaSets
)

// failoverLoad is the load while leaders are killed: applies and watches at every replica, and a
// stream of ReplicaSets of one pod each. The ReplicaSets keep the controllers, the scheduler and
// the agents busy.
type failoverLoad struct {
	plane  *plane
	load   stream.Load
	parts  sync.WaitGroup
	agents []*sessionRecorder
	pods   *podStream
	end    context.CancelFunc // stops the creation of ReplicaSets
}

func (l *failoverLoad) startLoad(ctx context.Context, agents int) error {
	l.load = stream.Load{Names: l.plane.Names(), Clients: map[string]kubernetes.Interface{},
		Namespace: failoverNamespace,
		Call:      20 * time.Second}
	for _, name := range l.load.Names {
		cs, err := l.plane.newClient(name)
		if err != nil {
			return err
		}
		l.load.Clients[name] = cs
	}
	for i := range agents {
		l.startAgent(ctx, i)
	}
	cs := l.load.Clients[l.load.Names[0]]
	if err := createNamespace(ctx, cs, failoverNamespace); err != nil {
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
			return fmt.Errorf("%d of %d nodes accept pods", free, agents)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := l.load.Start(ctx); err != nil {
		return err
	}
	made, end := context.WithCancel(ctx)
	l.end, l.pods = end, &podStream{load: l, acked: map[int]time.Time{}, seen: map[int]*[3]time.Time{}}
	l.pods.startStream(ctx, made)
	return nil
}

// awaitEnd returns when all goroutines of the load have ended. Their context must have ended.
func (l *failoverLoad) awaitEnd() { l.load.Wait(); l.parts.Wait() }

// sessionRecorder is the log handler of an agent. It records the replica and time of the agent's
// last opened session.
type sessionRecorder struct {
	name string

	mu     sync.Mutex
	at     string
	opened time.Time
}

func (l *failoverLoad) startAgent(ctx context.Context, i int) {
	a := &sessionRecorder{name: nodeName(i)}
	l.agents = append(l.agents, a)
	agent := loopback.Agent{Name: a.name, Token: l.plane.Founded.NodeToken,
		Dir:     filepath.Join(l.plane.dir, "agents", a.name),
		Source:  net.IPv4(127, 64, 0, byte(i+1)),
		Address: fmt.Sprintf("100.64.0.%d", i+1), CheckpointEvery: checkpointEvery, Log: slog.New(a)}
	for n := range l.load.Names {
		agent.Servers = append(agent.Servers, l.plane.FleetAddress((i+n)%replicas))
	}
	l.parts.Go(func() { _ = agent.Run(ctx) }) // the load fails anyway if an agent is missing
}

// Enabled implements slog.Handler.
func (a *sessionRecorder) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

// WithAttrs implements slog.Handler.
func (a *sessionRecorder) WithAttrs([]slog.Attr) slog.Handler { return a }

// WithGroup implements slog.Handler.
func (a *sessionRecorder) WithGroup(string) slog.Handler { return a }

// Handle implements slog.Handler. It records "session opened" and ignores all other messages.
func (a *sessionRecorder) Handle(_ context.Context, r slog.Record) error {
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

// openedAfter returns the time of the agent's last opened session. The second result is true if the
// session was opened after elected.
func (a *sessionRecorder) openedAfter(elected time.Time) (time.Time, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.opened, a.opened.After(elected)
}

// agentsAt returns the recorders of the agents whose last session is at a replica.
func (l *failoverLoad) agentsAt(replica string) (out []*sessionRecorder) {
	for _, a := range l.agents {
		a.mu.Lock()
		if a.at == replica {
			out = append(out, a)
		}
		a.mu.Unlock()
	}
	return out
}

// podStream creates ReplicaSets of one pod each, one after the other. It records when each pod was
// first seen, bound and running.
type podStream struct {
	load *failoverLoad

	mu    sync.Mutex
	acked map[int]time.Time // when the ReplicaSet's creation was acknowledged
	seen  map[int]*[3]time.Time
}

// startStream watches pods until ctx ends, and creates ReplicaSets until the context creating ends.
func (s *podStream) startStream(ctx, creating context.Context) {
	for _, name := range s.load.load.Names {
		s.load.parts.Go(func() { s.watchPods(ctx, s.load.load.Clients[name]) })
	}
	s.load.parts.Go(func() { s.createReplicaSets(creating) })
}

func (s *podStream) createReplicaSets(ctx context.Context) {
	names, at := s.load.load.Names, 0
	const kept = 100
	for n := 0; wait.Delay(ctx, streamPace) == nil; n++ {
		d := newDeployment("s", 1)
		set := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("r%d", n)},
			Spec: appsv1.ReplicaSetSpec{
				Replicas: d.Spec.Replicas,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"n": strconv.Itoa(n)}},
				Template: d.Spec.Template}}
		set.Spec.Template.Labels = set.Spec.Selector.MatchLabels
		for ctx.Err() == nil {
			sets := s.load.load.Clients[names[at]].AppsV1().ReplicaSets(failoverNamespace)
			_, err := sets.Create(ctx, set, metav1.CreateOptions{})
			if err == nil || apierrors.IsAlreadyExists(err) {
				s.mu.Lock()
				s.acked[n] = time.Now()
				s.mu.Unlock()
				if n >= kept {
					// if it fails, one ReplicaSet stays
					_ = sets.Delete(ctx, fmt.Sprintf("r%d", n-kept), metav1.DeleteOptions{})
				}
				break
			}
			at = (at + 1) % len(names)
		}
	}
}

// watchPods records the pods that a replica reports. It starts a new watch when the watch has
// ended.
func (s *podStream) watchPods(ctx context.Context, cs kubernetes.Interface) {
	for ctx.Err() == nil {
		w, err := cs.CoreV1().Pods(failoverNamespace).Watch(ctx, metav1.ListOptions{})
		if err != nil {
			_ = wait.Delay(ctx, 20*time.Millisecond)
			continue
		}
		for e := range w.ResultChan() {
			if p, ok := e.Object.(*v1.Pod); ok {
				s.recordPod(p, time.Now())
			}
		}
		w.Stop()
	}
}

func (s *podStream) recordPod(p *v1.Pod, now time.Time) {
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

// earliestAfter returns the earliest times at which a pod was seen, bound and running. It considers
// the pods of ReplicaSets that were acknowledged after start. ok is true if all three times are
// known.
func (s *podStream) earliestAfter(start time.Time) (first [3]time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, acked := range s.acked {
		if at := s.seen[n]; at != nil && acked.After(start) {
			for i, t := range at {
				if !t.IsZero() && (first[i].IsZero() || t.Before(first[i])) {
					first[i] = t
				}
			}
		}
	}
	return first, !first[0].IsZero() && !first[1].IsZero() && !first[2].IsZero()
}
