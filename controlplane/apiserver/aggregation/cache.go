package aggregation

import (
	"context"
	"sync"
	"time"

	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

// Lifetimes of cached responses, and limits of the concurrent requests to aggregated API servers.
const (
	successLifetime    = 30 * time.Second
	usableAge          = 2 * time.Minute // a response of this age is still returned while a new request runs
	failureLifetime    = 3 * time.Second // lifetime of a failure; doubled for each further failure in a row
	maxFailureLifetime = time.Minute
	documentWait       = 500 * time.Millisecond // wait of a merged document for servers without a cached response
	// concurrent requests; applies separately to available servers and to all others
	maxRequests = 16
)

// cachedDocument is the cached response for one document of an API server. remote.mu guards it.
type cachedDocument[T any] struct {
	value      T // of the last successful response
	hasValue   bool
	err        error // of the last response
	receivedAt time.Time
	expiresAt  time.Time // when the response expires
	failures   int       // failed requests in a row
	version    string    // resourceVersion of the APIService at the start of the last finished request
	startedAt  time.Time // start of the running request
	done       chan struct{}
}

// documentView is a snapshot of a cachedDocument, as lookUpDocument returns it.
type documentView[T any] struct {
	value    T
	hasValue bool // value is set
	current  bool // value is set, and the last request did not fail
	version  string
	// pending is closed when the running request ends; nil if no request runs. pendingFirst equals
	// pending if a merged document should wait for the request, else it is nil. It should wait if a
	// new or recently recovered server has no usable response, and the request has run for less
	// than documentWait.
	pending, pendingFirst <-chan struct{}
}

// lookUpDocument returns the cached response of a document, and starts a request if the response
// has expired. At most one request per document runs at a time. A change of the APIService expires
// all responses, because it may contain a new result of the leader's availability check.
func lookUpDocument[T any](
	l *Layer, r *remote, h *cachedDocument[T], s *apiregistrationv1.APIService, fetch func(context.Context) (T, error),
) documentView[T] {
	version := s.ResourceVersion
	r.mu.Lock()
	defer r.mu.Unlock()
	now := l.cfg.Clock()
	if h.done == nil && (!now.Before(h.expiresAt) || h.version != version) {
		h.done, h.startedAt = make(chan struct{}), now
		through := &l.availableQueue
		if h.failures > 0 || !isAvailable(s) {
			through = &l.otherQueue
		}
		through.enqueue(func() { fetchAndStore(l, r, h, version, fetch) })
	}
	v := documentView[T]{value: h.value, hasValue: h.hasValue, current: h.hasValue && h.err == nil, version: h.version,
		pending: h.done}
	// a failed server that has recovered counts as new
	fresh := h.failures == 0 || h.version != version && isAvailable(s)
	if h.done != nil && fresh && (!h.hasValue || now.After(h.receivedAt.Add(usableAge))) &&
		now.Before(h.startedAt.Add(documentWait)) {
		v.pendingFirst = h.done
	}
	return v
}

// fetchAndStore requests a document with fetch and stores the result in h. version is the
// resourceVersion of the APIService.
func fetchAndStore[T any](
	l *Layer, r *remote, h *cachedDocument[T], version string, fetch func(context.Context) (T, error),
) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	var got T
	err := errUnavailable
	if l.isCurrent(r) { // the server may have been replaced while the request was queued
		got, err = fetch(ctx)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := l.cfg.Clock()
	h.err, h.version = err, version
	if err == nil {
		h.value, h.hasValue, h.failures, h.receivedAt, h.expiresAt = got, true, 0, now, now.Add(successLifetime)
	} else {
		h.expiresAt = now.Add(min(failureLifetime<<min(h.failures, 8), maxFailureLifetime))
		h.failures++
	}
	close(h.done)
	h.done = nil
}

// awaitDocument is like lookUpDocument, but it waits for a running request if the cached response
// is not current. Callers that cannot do without a response use it.
func awaitDocument[T any](
	ctx context.Context, l *Layer, r *remote, h *cachedDocument[T], s *apiregistrationv1.APIService,
	fetch func(context.Context) (T, error),
) documentView[T] {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	v := lookUpDocument(l, r, h, s, fetch)
	if v.pending == nil || v.current && v.version == s.ResourceVersion {
		return v
	}
	select {
	case <-v.pending:
		return lookUpDocument(l, r, h, s, fetch)
	case <-ctx.Done():
		return v
	}
}

// visitDocuments calls visit for each server. Each channel that visit returns belongs to a request.
// visitDocuments waits for these requests, and then calls visit for each server again, until visit
// returns only nil. It waits at most documentWait in total.
func (l *Layer) visitDocuments(
	ctx context.Context, remotes []*remote, visit func(int, *remote, *apiregistrationv1.APIService) <-chan struct{},
) {
	t := time.NewTimer(documentWait)
	defer t.Stop()
	for more := true; more; {
		var soon []<-chan struct{}
		for i, r := range remotes {
			s, ok := l.cfg.Cached(ctx, r.name)
			if !ok {
				s = &apiregistrationv1.APIService{} // the APIService was just deleted
			}
			if c := visit(i, r, s); c != nil {
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

// requestQueue runs functions in the order of arrival, at most limit at the same time. A queued
// function needs no goroutine.
type requestQueue struct {
	limit int

	mu      sync.Mutex
	waiting []func()
	running int
}

func (a *requestQueue) enqueue(task func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.running == a.limit {
		a.waiting = append(a.waiting, task)
		return
	}
	a.running++
	go a.runQueued(task)
}

func (a *requestQueue) runQueued(task func()) {
	for task != nil {
		task()
		task = a.takeNext()
	}
}

func (a *requestQueue) takeNext() (question func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) == 0 {
		a.running, a.waiting = a.running-1, nil
		return nil
	}
	question, a.waiting = a.waiting[0], a.waiting[1:]
	return question
}
