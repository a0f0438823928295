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

const tokensFile = "tokens.json" // tokensFile is the file in the run folder with the cached tokens.

// tokenKey identifies a bound service account token.
type tokenKey struct {
	Pod        types.UID `json:"Pod"`
	Audience   string    `json:"Audience"`
	Expiration int64     `json:"Expiration"` // requested lifetime in seconds
}

// cachedToken is an entry of tokensFile. The JSON names must not change: earlier releases read and
// write the file with these names.
type cachedToken struct {
	Key     tokenKey  `json:"Key"`
	Token   string    `json:"Token"`
	Expires time.Time `json:"Expires"`
	Renew   time.Time `json:"Renew"` // when 80 % of the lifetime have passed
}

// tokenCache caches bound service account tokens, and requests missing or expiring tokens over the
// session.
type tokenCache struct {
	file string
	wake func()

	mu            sync.Mutex
	cached        map[tokenKey]cachedToken
	inFlight      map[tokenKey]chan struct{} // closed when the request of this token has ended
	pending       map[uint64]*pendingTokenRequest
	lastRequestID uint64
}

// pendingTokenRequest is a token request without a response. It is sent in the current session, and
// again in later sessions.
type pendingTokenRequest struct {
	request  *fleetv1.TokenRequest
	response chan *fleetv1.Token // buffered
	sent     bool
}

func newTokenCache(dir string, wake func()) *tokenCache {
	return &tokenCache{
		file: filepath.Join(dir, tokensFile), wake: wake,
		cached: make(map[tokenKey]cachedToken), inFlight: make(map[tokenKey]chan struct{}),
		pending: make(map[uint64]*pendingTokenRequest),
	}
}

func (t *tokenCache) requestToken(ctx context.Context, k tokenKey, pod *v1.Pod) (cachedToken, error) {
	a := &pendingTokenRequest{response: make(chan *fleetv1.Token, 1), request: &fleetv1.TokenRequest{
		Namespace: pod.Namespace, ServiceAccount: pod.Spec.ServiceAccountName,
		PodName: pod.Name, PodUid: string(pod.UID), ExpirationSeconds: k.Expiration,
	}}
	if k.Audience != "" {
		a.request.Audiences = []string{k.Audience}
	}
	t.mu.Lock()
	t.lastRequestID++
	a.request.Id = t.lastRequestID
	t.pending[a.request.Id] = a
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		delete(t.pending, a.request.Id)
		t.mu.Unlock()
	}()
	t.wake()
	select {
	case got := <-a.response:
		if got.Error != "" {
			return cachedToken{}, errors.New(got.Error)
		}
		now, expires := time.Now(), time.Unix(got.ExpiresUnix, 0)
		return cachedToken{Key: k, Token: got.Token, Expires: expires,
			Renew: tokenRenewalTime(now, expires, k.Expiration)}, nil
	case <-ctx.Done():
		return cachedToken{}, ctx.Err()
	}
}

// tokenRenewalTime returns the time at which 80 % of a token's lifetime will have passed. The
// lifetime is the time from now to expires. If the clocks of node and replica disagree, it can be
// longer than requested, or negative. requestedSeconds is used instead in that case.
func tokenRenewalTime(now, expires time.Time, requestedSeconds int64) time.Time {
	life, asked := expires.Sub(now), time.Duration(requestedSeconds)*time.Second
	if asked > 0 && (life <= 0 || life > asked) {
		life = asked
	}
	return now.Add(life / 5 * 4)
}

// resetRequests marks all pending token requests as unsent, so that a new session sends them again.
func (t *tokenCache) resetRequests() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range t.pending {
		a.sent = false
	}
}

func (t *tokenCache) unsentRequests() []*fleetv1.AgentMessage {
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

func (t *tokenCache) handleToken(m *fleetv1.Token) {
	t.mu.Lock()
	a := t.pending[m.Id]
	delete(t.pending, m.Id)
	t.mu.Unlock()
	if a != nil {
		a.response <- m
	}
}

// retainTokens drops the cached tokens of all pods that are not in pods.
func (t *tokenCache) retainTokens(pods map[types.UID]struct{}) {
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
		t.saveTokens()
	}
}

// saveTokens writes the cached tokens to tokensFile. Errors are ignored, because tokens can be
// requested again after a restart.
func (t *tokenCache) saveTokens() {
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

func (t *tokenCache) loadTokens(now time.Time) error {
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
			// An earlier process computed the renewal time, perhaps with another clock. From here
			// on, the monotonic clock applies.
			if latest := tokenRenewalTime(now, c.Expires, c.Key.Expiration); c.Renew.After(latest) {
				c.Renew = latest
			}
			c.Renew = now.Add(c.Renew.Sub(now))
			t.cached[c.Key] = c
		}
	}
	return nil
}
