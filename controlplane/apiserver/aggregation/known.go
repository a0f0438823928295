package aggregation

import (
	"context"
	"sync"
	"time"

	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// How long answers are taken for true, and how many questions are under way.
const (
	keepGood   = 30 * time.Second
	usable     = 2 * time.Minute // an older answer is told while the next one comes
	keepBad    = 3 * time.Second // a failure; each further one in a row twice as long
	keepBadMax = time.Minute
	patience   = 500 * time.Millisecond // who wants a document waits so long for servers that were never asked
	maxAsking  = 16                     // at once, of those that are held available and of the others each
)

// heard is what a server answered last. The remote's mu guards it.
type heard[T any] struct {
	value   T // of the last good answer
	good    bool
	err     error // of the last answer
	at      time.Time
	until   time.Time // when it is asked for again
	failed  int       // answers in a row that were failures
	version string    // of the APIService when the last answer's question was put
	began   time.Time // of the question that is under way
	busy    chan struct{}
}

// view is what is known of a question without asking.
type view[T any] struct {
	value   T
	good    bool // there is a value
	current bool // and the last answer was no failure
	version string
	// under is closed at the end of the question that is under way; soon is the same where it is worth waiting for: a
	// server that nobody knows yet, or that has just become available, answers within patience, or has had its chance.
	under, soon <-chan struct{}
}

// look says what is known, and has the question put again when that is too old: once at a time, whoever wants to know.
// A change of the APIService makes every answer old at once, for that is how the leader tells what it found.
func look[T any](l *Layer, r *remote, h *heard[T], s *apiregistrationv1.APIService, ask func(context.Context) (T, error)) view[T] {
	version := s.ResourceVersion
	r.mu.Lock()
	defer r.mu.Unlock()
	now := l.cfg.Clock()
	if h.busy == nil && (!now.Before(h.until) || h.version != version) {
		h.busy, h.began = make(chan struct{}), now
		through := &l.sound
		if h.failed > 0 || !isAvailable(s) {
			through = &l.doubtful
		}
		through.enter(func() { put(l, r, h, version, ask) })
	}
	v := view[T]{value: h.value, good: h.good, current: h.good && h.err == nil, version: h.version, under: h.busy}
	// One that failed and has been found available since is as one that was never asked.
	fresh := h.failed == 0 || h.version != version && isAvailable(s)
	if h.busy != nil && fresh && (!h.good || now.After(h.at.Add(usable))) && now.Before(h.began.Add(patience)) {
		v.soon = h.busy
	}
	return v
}

// put puts a question and keeps what comes of it.
func put[T any](l *Layer, r *remote, h *heard[T], version string, ask func(context.Context) (T, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	var got T
	err := errUnavailable
	if l.has(r) { // its turn may have come late
		got, err = ask(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := l.cfg.Clock()
	h.err, h.version = err, version
	if err == nil {
		h.value, h.good, h.failed, h.at, h.until = got, true, 0, now, now.Add(keepGood)
	} else {
		h.until = now.Add(min(keepBad<<min(h.failed, 8), keepBadMax))
		h.failed++
	}
	close(h.busy)
	h.busy = nil
}

// known is what is known after the question that is under way, if one is, has been answered: for a request that cannot
// go on without.
func known[T any](ctx context.Context, l *Layer, r *remote, h *heard[T], s *apiregistrationv1.APIService, ask func(context.Context) (T, error)) view[T] {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	v := look(l, r, h, s, ask)
	if v.under == nil || v.current && v.version == s.ResourceVersion {
		return v
	}
	select {
	case <-v.under:
		return look(l, r, h, s, ask)
	case <-ctx.Done():
		return v
	}
}

// settle looks at all servers, and again as long as there are answers to wait for, patience at most in all.
func (l *Layer) settle(ctx context.Context, remotes []*remote, look func(int, *remote, *apiregistrationv1.APIService) <-chan struct{}) {
	t := time.NewTimer(patience)
	defer t.Stop()
	for more := true; more; {
		var soon []<-chan struct{}
		for i, r := range remotes {
			s, ok := l.cfg.Cached(ctx, r.name)
			if !ok {
				s = &apiregistrationv1.APIService{} // it has gone just now
			}
			if c := look(i, r, s); c != nil {
				soon = append(soon, c)
			}
		}
		more = len(soon) > 0
		for _, c := range soon {
			select {
			case <-c:
			case <-t.C:
				return
			case <-ctx.Done():
				return
			}
		}
	}
}

// asker puts questions in their order, some at once. Who waits takes no goroutine.
type asker struct {
	places int

	mu      sync.Mutex
	waiting []func()
	running int
}

func (a *asker) enter(question func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running == a.places {
		a.waiting = append(a.waiting, question)
		return
	}
	a.running++
	go a.run(question)
}

func (a *asker) run(question func()) {
	for question != nil {
		question()
		question = a.next()
	}
}

func (a *asker) next() (question func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) == 0 {
		a.running, a.waiting = a.running-1, nil
		return nil
	}
	question, a.waiting = a.waiting[0], a.waiting[1:]
	return question
}
