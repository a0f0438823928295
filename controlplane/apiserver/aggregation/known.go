package aggregation

import (
	"context"
	"sync"
	"time"

	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// Lifetimes of cached responses, and limits of the requests in progress.
const (
	keepGood   = 30 * time.Second
	usable     = 2 * time.Minute // an older response is used while a new request runs
	keepBad    = 3 * time.Second // lifetime of a failure; doubled for each further failure in a row
	keepBadMax = time.Minute
	patience   = 500 * time.Millisecond // how long a document waits for servers without a cached response
	maxAsking  = 16                     // concurrent requests; applies separately to available servers and to all others
)

// heard is the cached response of one document. The remote's mu guards it.
type heard[T any] struct {
	value   T // of the last successful response
	good    bool
	err     error // of the last response
	at      time.Time
	until   time.Time // when the response expires
	failed  int       // failed requests in a row
	version string    // resourceVersion of the APIService at the start of the last finished request
	began   time.Time // start of the running request
	busy    chan struct{}
}

// view is the cached state of a document.
type view[T any] struct {
	value   T
	good    bool // value is set
	current bool // and the last request did not fail
	version string
	// under is closed when the running request ends; nil if no request runs. soon equals under if
	// waiting is worthwhile, else it is nil. This is the case if a new or recently recovered server
	// has no usable response and the request has run for less than patience.
	under, soon <-chan struct{}
}

// look returns the cached response, and starts a request if it has expired. At most one request per
// document runs at a time. A change of the APIService expires all responses, because it may contain
// the leader's check result.
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
	// a failed server that has recovered counts as new
	fresh := h.failed == 0 || h.version != version && isAvailable(s)
	if h.busy != nil && fresh && (!h.good || now.After(h.at.Add(usable))) && now.Before(h.began.Add(patience)) {
		v.soon = h.busy
	}
	return v
}

// put requests a document with ask and stores the result in h. version is the resourceVersion of
// the APIService.
func put[T any](l *Layer, r *remote, h *heard[T], version string, ask func(context.Context) (T, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), askTime)
	defer cancel()
	var got T
	err := errUnavailable
	if l.has(r) { // the server may have been replaced while the request was queued
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

// known is look, but it waits for a running request if the cached response is not current. It is
// for requests that require a response.
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

// settle calls look for all servers, and again after the requests that are worth waiting for. It
// waits at most patience in total.
func (l *Layer) settle(ctx context.Context, remotes []*remote, look func(int, *remote, *apiregistrationv1.APIService) <-chan struct{}) {
	t := time.NewTimer(patience)
	defer t.Stop()
	for more := true; more; {
		var soon []<-chan struct{}
		for i, r := range remotes {
			s, ok := l.cfg.Cached(ctx, r.name)
			if !ok {
				s = &apiregistrationv1.APIService{} // the APIService was just deleted
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

// asker runs functions in the order of arrival. At most the number places run at once; queued
// functions need no goroutine.
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
