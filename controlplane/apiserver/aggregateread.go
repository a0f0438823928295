package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/input"
)

// What is read of an aggregated API for a part of this replica, and what is told of its refusal.
const (
	readAggregatedBytes = 4 << 20
	readAggregatedTime  = 10 * time.Second
	refusalBytes        = 256
)

// ErrNotAggregated says that no APIService points the group version of a path to a Service.
var ErrNotAggregated = errors.New("no APIService points it to a Service")

// ReadAggregated reads a path of a server in the cluster, as JSON, for a part of this replica that acts as u: on the
// same road as a client's request, with its authorization and its place among the others. The path is escaped.
func (s *Server) ReadAggregated(ctx context.Context, u api.User, path string, query url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, readAggregatedTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://aggregated"+path+"?"+query.Encode(), nil)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	r.Header.Set("Accept", "application/json")
	a := &aggregatedAnswer{header: http.Header{}, code: http.StatusOK}
	switch served := s.aggregated(a, r, u); {
	case !served:
		return nil, ErrNotAggregated
	case ctx.Err() != nil:
		return nil, fmt.Errorf("the server did not answer in time: %w", ctx.Err())
	case a.tooLong:
		return nil, fmt.Errorf("the server answered more than %d bytes", readAggregatedBytes)
	case a.cut():
		return nil, errors.New("the server's answer was cut off")
	case a.code != http.StatusOK:
		return nil, fmt.Errorf("the server answered %d: %s", a.code, refusal(a.body.Bytes()))
	}
	if err := input.CheckJSON(a.body.Bytes(), nil); err != nil {
		return nil, fmt.Errorf("the server's answer: %w", err)
	}
	return a.body.Bytes(), nil
}

// refusal is what a server says of why not, in a few printable words.
func refusal(body []byte) string {
	text := string(body)
	var status metav1.Status
	if len(body) < 64<<10 && json.Unmarshal(body, &status) == nil && status.Message != "" {
		text = status.Message
	}
	text = strings.ToValidUTF8(text[:min(len(text), refusalBytes)], "")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text))
}

// aggregatedAnswer keeps an answer, up to its bound.
type aggregatedAnswer struct {
	header  http.Header
	code    int
	body    bytes.Buffer
	tooLong bool
}

// cut says that less came than was announced.
func (a *aggregatedAnswer) cut() bool {
	n, err := strconv.Atoi(a.header.Get("Content-Length"))
	return err == nil && n != a.body.Len()
}

// Header implements http.ResponseWriter.
func (a *aggregatedAnswer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *aggregatedAnswer) WriteHeader(code int) {
	if code >= http.StatusOK { // the others come before the answer
		a.code = code
	}
}

// Write implements http.ResponseWriter.
func (a *aggregatedAnswer) Write(p []byte) (int, error) {
	if a.body.Len()+len(p) > readAggregatedBytes {
		a.tooLong = true
		return 0, errors.New("the answer is too long")
	}
	return a.body.Write(p)
}
