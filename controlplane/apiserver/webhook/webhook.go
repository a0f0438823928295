// Package webhook calls HTTPS services outside the cluster, with the address and credentials in a
// kubeconfig file. Requests and responses are JSON. The size and duration of a response and the
// number of concurrent requests are limited. A service that is slow or sends too much therefore
// delays only its own callers and cannot exhaust memory.
package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/internal/filewatch"
	"keelson.dev/keelson/internal/wait"
)

// Limits of the requests to one service.
const (
	maxAnswer     = 1 << 20
	maxKubeconfig = 1 << 20
	maxConcurrent = 128
	// maxTimeout is the maximum duration of a request with all retries.
	maxTimeout = 30 * time.Second
)

// The retry parameters for temporary errors, with the defaults of Kubernetes.
const (
	attempts   = 5
	firstDelay = 500 * time.Millisecond
	growth     = 1.5
	jitter     = 0.2
)

// Service is a client of one HTTPS service.
type Service struct {
	url     string
	client  *http.Client
	timeout time.Duration
	slots   chan struct{}
	delay   time.Duration // delay before the first retry; tests shorten it
}

// FromKubeconfig returns a client for the service in the current context of a kubeconfig file.
// timeout limits each request; 0 = 30 s.
func FromKubeconfig(path string, timeout time.Duration) (*Service, error) {
	data, err := filewatch.Read(path, maxKubeconfig)
	if err != nil {
		return nil, err
	}
	if _, err := clientcmd.Load(data); err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	// resolves relative paths against the file's directory
	loading := &clientcmd.ClientConfigLoadingRules{ExplicitPath: path}
	conf, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(loading,
		&clientcmd.ConfigOverrides{}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	s, err := New(conf, timeout)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", path, err)
	}
	return s, nil
}

// New returns a client that sends requests to exactly the URL conf.Host. timeout limits each
// request.
func New(conf *rest.Config, timeout time.Duration) (*Service, error) {
	conf = rest.CopyConfig(conf)
	conf.Timeout = 0 // the context's deadline applies instead
	if conf.Dial == nil {
		conf.Dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	client, err := rest.HTTPClientFor(conf)
	if err != nil {
		return nil, err
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	if timeout <= 0 || timeout > maxTimeout {
		timeout = maxTimeout
	}
	return &Service{
		url: conf.Host, client: client, timeout: timeout, slots: make(chan struct{}, maxConcurrent), delay: firstDelay,
	}, nil
}

// Post sends request as JSON and decodes the response body into response. It retries after
// temporary errors of the service or the connection.
func (s *Service) Post(ctx context.Context, request, response any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.timeout,
		fmt.Errorf("%s did not respond within %v: %w", s.url, s.timeout, context.DeadlineExceeded))
	defer cancel()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return fmt.Errorf("%d calls of %s are in progress: %w", maxConcurrent, s.url, context.Cause(ctx))
	}
	delay := s.delay
	for attempt := 1; ; attempt++ {
		err := s.postOnce(ctx, body, response)
		var again *transient
		if err == nil || attempt == attempts || !errors.As(err, &again) || ctx.Err() != nil {
			return err
		}
		pause := time.Duration(float64(delay) * (1 + jitter*rand.Float64()))
		if wait.Delay(ctx, max(pause, again.retryAfter)) != nil {
			return err
		}
		delay = time.Duration(float64(delay) * growth)
	}
}

// transient is an error after which the request is retried.
type transient struct {
	err        error
	retryAfter time.Duration // value of the header Retry-After in the response
}

func (t *transient) Error() string { return t.err.Error() }
func (t *transient) Unwrap() error { return t.err }

// isBrokenConn reports whether the connection was closed during a request. As in Kubernetes, other
// connection errors are not retried, because a refused connection or a wrong server is unlikely to
// recover soon.
func isBrokenConn(err error) bool {
	return utilnet.IsConnectionReset(err) || utilnet.IsHTTP2ConnectionLost(err) || utilnet.IsProbableEOF(err)
}

func (s *Service) postOnce(ctx context.Context, body []byte, response any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	resp, err := s.client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("asking: %w", context.Cause(ctx))
		}
		if isBrokenConn(err) {
			return &transient{err: err}
		}
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case ctx.Err() != nil: // the service may have responded only because the connection was closed
		return fmt.Errorf("reading the response: %w", context.Cause(ctx))
	case err != nil:
		return &transient{err: fmt.Errorf("reading the response of %s: %w", s.url, err)}
	case len(data) > maxAnswer:
		return fmt.Errorf("the response of %s exceeds %d bytes", s.url, maxAnswer)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return newRefusal(s.url, resp, data)
	}
	if err := json.Unmarshal(data, response); err != nil {
		return fmt.Errorf("decoding the response of %s: %w", s.url, err)
	}
	return nil
}

// quoted is the maximum number of bytes of an error response that the returned error contains.
const quoted = 256

func newRefusal(url string, resp *http.Response, data []byte) error {
	if len(data) > quoted {
		data = data[:quoted]
	}
	err := fmt.Errorf("%s answered %s: %q", url, resp.Status, data)
	seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	after := min(max(time.Duration(seconds)*time.Second, 0), maxTimeout)
	if resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusInternalServerError || after > 0 {
		return &transient{err: err, retryAfter: after}
	}
	return err
}

// Close closes the idle connections.
func (s *Service) Close() { utilnet.CloseIdleConnectionsFor(s.client.Transport) }
