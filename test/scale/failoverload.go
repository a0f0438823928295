package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bed/loopback"
)

const (
	failoverSpace = "failover"
	appliers      = 9 // a third of them at each replica
	applyPace     = 10 * time.Millisecond
	streamPace    = 25 * time.Millisecond // between two ReplicaSets of one pod each
	namesOfEach   = 10
)

// failoverLoad is what goes on while leaders die: applies and watches at every replica, and ReplicaSets of one pod each, so
// that controllers, scheduler and agents always have something to do.
type failoverLoad struct {
	*plane
	parts   sync.WaitGroup
	dead    atomic.Pointer[string] // the replica that is down; "" = none
	clients map[string]*kubernetes.Clientset
	agents  []*failoverAgent
	watches []*historyWatch
	stream  *podStream
	endLoad context.CancelFunc

	mu     sync.Mutex
	acks   map[string]string // by resource version: which write it was
	times  []time.Time       // of writes that survivors acknowledged
	calls  int
	failed []error
}

func (l *failoverLoad) start(ctx context.Context, agents int) error {
	l.clients, l.acks = map[string]*kubernetes.Clientset{}, map[string]string{}
	none := ""
	l.dead.Store(&none)
	for _, name := range l.Names() {
		cs, err := l.client(name)
		if err != nil {
			return err
		}
		l.clients[name] = cs
	}
	for i := range agents {
		l.agent(ctx, i)
	}
	cs := l.clients[l.Names()[0]]
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
	list, err := cs.CoreV1().ConfigMaps(failoverSpace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range l.Names() {
		w := &historyWatch{load: l, home: i, from: list.ResourceVersion}
		l.watches = append(l.watches, w)
		l.parts.Go(func() { w.run(ctx) })
	}
	load, end := context.WithCancel(ctx)
	l.endLoad = end
	for i := range appliers {
		l.parts.Go(func() { l.apply(load, i) })
	}
	l.stream = &podStream{load: l, acked: map[int]time.Time{}, seen: map[int]*[3]time.Time{}}
	return l.stream.start(ctx, load)
}

// next is the replica that a client turns to, which was at place i.
func (l *failoverLoad) next(i int) int { return (i + 1) % len(l.Names()) }

// apply writes again and again at one replica, and at the next one while its own is dead.
func (l *failoverLoad) apply(ctx context.Context, id int) {
	at := id % len(l.Names())
	for n := 0; wait.Delay(ctx, applyPace) == nil; n++ {
		name := fmt.Sprintf("c%d-%d", id, n%namesOfEach)
		what := strconv.Itoa(n)
		cm := corev1apply.ConfigMap(name, failoverSpace).WithData(map[string]string{"n": what})
		for ctx.Err() == nil {
			replica := l.Names()[at]
			call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
			got, err := l.clients[replica].CoreV1().ConfigMaps(failoverSpace).Apply(call, cm, metav1.ApplyOptions{FieldManager: "bench", Force: true})
			cancel()
			l.mu.Lock()
			l.calls++
			if err == nil {
				l.acks[got.ResourceVersion] = name + "=" + what
				l.times = append(l.times, time.Now())
			} else if *l.dead.Load() != replica {
				l.failed = append(l.failed, fmt.Errorf("apply of %s at %s: %w", name, replica, err))
			}
			l.mu.Unlock()
			if err == nil {
				break
			}
			at = l.next(at)
		}
		if home := id % len(l.Names()); *l.dead.Load() == "" {
			at = home
		}
	}
}

// pause is the longest time without a write since a moment.
func (l *failoverLoad) pause(from time.Time) (longest time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortFunc(l.times, time.Time.Compare)
	last := from
	for _, t := range l.times {
		if t.After(from) {
			longest, last = max(longest, t.Sub(last)), t
		}
	}
	return longest
}

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
	for n := range l.Names() {
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

func (s *podStream) start(ctx, load context.Context) error {
	for _, name := range s.load.Names() {
		s.load.parts.Go(func() { s.watch(ctx, s.load.clients[name]) })
	}
	s.load.parts.Go(func() { s.make(load) })
	return nil
}

func (s *podStream) make(ctx context.Context) {
	names, at := s.load.Names(), 0
	const kept = 100
	for n := 0; wait.Delay(ctx, streamPace) == nil; n++ {
		d := deployment("s", 1)
		set := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("r%d", n)}, Spec: appsv1.ReplicaSetSpec{
			Replicas: d.Spec.Replicas, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"n": strconv.Itoa(n)}}, Template: d.Spec.Template}}
		set.Spec.Template.Labels = set.Spec.Selector.MatchLabels
		for ctx.Err() == nil {
			sets := s.load.clients[names[at]].AppsV1().ReplicaSets(failoverSpace)
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
			at = s.load.next(at)
		}
	}
}

// watch notes what a replica tells of pods; it begins again from now when the replica has died.
func (s *podStream) watch(ctx context.Context, cs *kubernetes.Clientset) {
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

// historyWatch follows the ConfigMaps at one replica, and at the next one when that ends its watch.
type historyWatch struct {
	load *failoverLoad
	home int
	from string

	mu       sync.Mutex
	events   []string // "resource version name=value"
	versions []uint64
	broken   []error   // watches that ended although their replica lives
	ended    time.Time // of the watch that waits to go on; zero = none does
	resumed  time.Time // the first event of the last one that went on
}

func (h *historyWatch) run(ctx context.Context) {
	from := h.from
	for at := h.home; ctx.Err() == nil; at = h.load.next(at) {
		replica := h.load.Names()[at]
		w, err := h.load.clients[replica].CoreV1().ConfigMaps(failoverSpace).Watch(ctx, metav1.ListOptions{ResourceVersion: from})
		if err != nil {
			_ = wait.Delay(ctx, 5*time.Millisecond)
			continue
		}
		for e := range w.ResultChan() {
			c, ok := e.Object.(*v1.ConfigMap)
			if !ok {
				h.note(func() { h.broken = append(h.broken, fmt.Errorf("watch at %s: %v", replica, e.Object)) })
				break
			}
			from = c.ResourceVersion
			h.note(func() { h.take(c) })
		}
		w.Stop()
		h.note(func() {
			if h.ended = time.Now(); *h.load.dead.Load() != replica && ctx.Err() == nil {
				h.broken = append(h.broken, fmt.Errorf("a watch at %s ended, which lives", replica))
			}
		})
	}
}

func (h *historyWatch) note(do func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	do()
}

// take is called under the lock.
func (h *historyWatch) take(c *v1.ConfigMap) {
	if !h.ended.IsZero() {
		h.ended, h.resumed = time.Time{}, time.Now()
	}
	v, _ := strconv.ParseUint(c.ResourceVersion, 10, 64)
	h.versions = append(h.versions, v)
	h.events = append(h.events, c.ResourceVersion+" "+c.Name+"="+c.Data["n"])
}

// again is when it went on last; waits says that it has not yet.
func (h *historyWatch) again() (at time.Time, waits bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.resumed, !h.ended.IsZero()
}

// history is what all have seen, held against each other.
type history struct {
	calls, failed, events, watches, broken, wrong, acked, lost int
}

// verdict ends the writes, waits until every watch has the last of them, and compares.
func (l *failoverLoad) verdict(ctx context.Context) (out history, err error) {
	l.endLoad()
	ctx, cancel := context.WithTimeout(ctx, failoverPatience)
	defer cancel()
	end, err := l.clients[l.Names()[0]].CoreV1().ConfigMaps(failoverSpace).Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "end"}}, metav1.CreateOptions{})
	if err != nil {
		return out, err
	}
	last, _ := strconv.ParseUint(end.ResourceVersion, 10, 64)
	for _, w := range l.watches {
		err := wait.For(ctx, 10*time.Millisecond, func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if n := len(w.versions); n == 0 || w.versions[n-1] < last {
				return errors.New("a watch has not seen the last write")
			}
			return nil
		})
		if err != nil {
			return out, err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	out.calls, out.failed, out.acked, out.watches = l.calls, len(l.failed), len(l.acks), len(l.watches)
	errs := l.failed
	have := map[string]bool{}
	for _, w := range l.watches {
		w.mu.Lock()
		out.events += len(w.events)
		out.broken += len(w.broken)
		errs = append(errs, w.broken...)
		out.wrong += differences(l.watches[0].events, w.events) + disorder(w.versions)
		for _, e := range w.events {
			have[e] = true
		}
		w.mu.Unlock()
	}
	for version, what := range l.acks {
		if !have[version+" "+what] {
			out.lost++
			errs = append(errs, fmt.Errorf("write %s was acknowledged at %s, and no watch has seen it", what, version))
		}
	}
	for _, e := range errs[:min(len(errs), 10)] {
		slog.Warn("failover", "what", strings.TrimSpace(e.Error()))
	}
	return out, nil
}

// disorder counts what did not come after what is before it.
func disorder(versions []uint64) (n int) {
	for i := 1; i < len(versions); i++ {
		if versions[i] <= versions[i-1] {
			n++
		}
	}
	return n
}

// differences counts events that one has and the other has not.
func differences(a, b []string) (n int) {
	count := map[string]int{}
	for _, e := range a {
		count[e]++
	}
	for _, e := range b {
		count[e]--
	}
	for _, c := range count {
		n += max(c, -c)
	}
	return n
}
