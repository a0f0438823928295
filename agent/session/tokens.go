package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

const tokensFile = "tokens.json" // in the run folder

// tokenKey names a bound token.
type tokenKey struct {
	Pod        types.UID
	Audience   string
	Expiration int64
}

type cachedToken struct {
	Key     tokenKey
	Token   string
	Expires time.Time
	Renew   time.Time // 80% of its life
}

// tokens caches bound tokens and asks for them over the session.
type tokens struct {
	file string
	wake func()

	mu      sync.Mutex
	cached  map[tokenKey]cachedToken
	asking  map[tokenKey]chan struct{} // closed when the answer is there
	pending map[uint64]*tokenAsk
	last    uint64
}

// tokenAsk is a request on its way, over whichever session there is.
type tokenAsk struct {
	request *fleetv1.TokenRequest
	answer  chan *fleetv1.Token // buffered
	sent    bool
}

func newTokens(dir string, wake func()) *tokens {
	return &tokens{
		file: filepath.Join(dir, tokensFile), wake: wake,
		cached: make(map[tokenKey]cachedToken), asking: make(map[tokenKey]chan struct{}), pending: make(map[uint64]*tokenAsk),
	}
}

// Token implements agent.Objects. While no control plane answers, a token that has not expired is good enough.
func (s *Session) Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (string, time.Time, error) {
	k := tokenKey{pod.UID, audience, expirationSeconds}
	t := s.tokens
	for {
		t.mu.Lock()
		have, ok := t.cached[k]
		now := time.Now()
		if ok && now.Before(have.Renew) {
			t.mu.Unlock()
			return have.Token, have.Expires, nil
		}
		wait := t.asking[k]
		if wait == nil {
			t.asking[k] = make(chan struct{})
		}
		t.mu.Unlock()
		if wait != nil { // somebody else asks for the same
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return "", time.Time{}, ctx.Err()
			}
		}
		got, err := t.ask(ctx, k, pod)
		t.mu.Lock()
		if err == nil {
			t.cached[k] = got
		}
		close(t.asking[k])
		delete(t.asking, k)
		t.mu.Unlock()
		switch {
		case err == nil:
			t.store()
			return got.Token, got.Expires, nil
		case ok && time.Now().Before(have.Expires):
			return have.Token, have.Expires, nil
		}
		return "", time.Time{}, fmt.Errorf("token of service account %s/%s for pod %s: %w", pod.Namespace, pod.Spec.ServiceAccountName, pod.Name, err)
	}
}

func (t *tokens) ask(ctx context.Context, k tokenKey, pod *v1.Pod) (cachedToken, error) {
	a := &tokenAsk{answer: make(chan *fleetv1.Token, 1), request: &fleetv1.TokenRequest{
		Namespace: pod.Namespace, ServiceAccount: pod.Spec.ServiceAccountName,
		PodName: pod.Name, PodUid: string(pod.UID), ExpirationSeconds: k.Expiration,
	}}
	if k.Audience != "" {
		a.request.Audiences = []string{k.Audience}
	}
	t.mu.Lock()
	t.last++
	a.request.Id = t.last
	t.pending[a.request.Id] = a
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		delete(t.pending, a.request.Id)
		t.mu.Unlock()
	}()
	t.wake()
	select {
	case got := <-a.answer:
		if got.Error != "" {
			return cachedToken{}, errors.New(got.Error)
		}
		now, expires := time.Now(), time.Unix(got.ExpiresUnix, 0)
		return cachedToken{Key: k, Token: got.Token, Expires: expires, Renew: renewal(now, expires, k.Expiration)}, nil
	case <-ctx.Done():
		return cachedToken{}, ctx.Err()
	}
}

// renewal is when a token that is had now is to be had anew: at 80% of its life. Where the node's clock disagrees with
// the replica's, a life that nobody asked for follows from the two; then what was asked for counts.
func renewal(now, expires time.Time, seconds int64) time.Time {
	life, asked := expires.Sub(now), time.Duration(seconds)*time.Second
	if asked > 0 && (life <= 0 || life > asked) {
		life = asked
	}
	return now.Add(life / 5 * 4)
}

// begin makes all pending requests due again for a new session.
func (t *tokens) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range t.pending {
		a.sent = false
	}
}

func (t *tokens) next() []*fleetv1.AgentMessage {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*fleetv1.AgentMessage
	for _, a := range t.pending {
		if !a.sent {
			a.sent = true
			out = append(out, &fleetv1.AgentMessage{Kind: &fleetv1.AgentMessage_TokenRequest{TokenRequest: a.request}})
		}
	}
	return out
}

func (t *tokens) answered(m *fleetv1.Token) {
	t.mu.Lock()
	a := t.pending[m.Id]
	delete(t.pending, m.Id)
	t.mu.Unlock()
	if a != nil {
		a.answer <- m
	}
}

// keep forgets the tokens of all pods but those.
func (t *tokens) keep(pods map[types.UID]struct{}) {
	t.mu.Lock()
	before := len(t.cached)
	for k := range t.cached {
		if _, ok := pods[k.Pod]; !ok {
			delete(t.cached, k)
		}
	}
	changed := len(t.cached) != before
	t.mu.Unlock()
	if changed {
		t.store()
	}
}

// store writes the cache to the run folder. Tokens can be had again: a failure costs a request after a restart.
func (t *tokens) store() {
	t.mu.Lock()
	list := make([]cachedToken, 0, len(t.cached))
	for _, c := range t.cached {
		list = append(list, c)
	}
	t.mu.Unlock()
	if data, err := json.Marshal(list); err == nil {
		_ = writeFile(t.file, data)
	}
}

func (t *tokens) load(now time.Time) error {
	data, err := os.ReadFile(t.file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read tokens: %w", err)
	}
	var list []cachedToken
	if err := json.Unmarshal(data, &list); err != nil {
		return fmt.Errorf("read tokens %s: %w", t.file, err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range list {
		if now.Before(c.Expires) {
			// It was written by another process, perhaps by another clock: monotonic from here on.
			if latest := renewal(now, c.Expires, c.Key.Expiration); c.Renew.After(latest) {
				c.Renew = latest
			}
			c.Renew = now.Add(c.Renew.Sub(now))
			t.cached[c.Key] = c
		}
	}
	return nil
}
