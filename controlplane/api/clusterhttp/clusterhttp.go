// Package clusterhttp implements the conventions of the HTTP paths below /cluster, which operators
// and the replicas of a cluster use: responses, errors, and headers of requests between replicas.
package clusterhttp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// HeaderForwarded marks a request from one replica to another. It is not forwarded again.
	HeaderForwarded = "Keelson-Forwarded-By"
	// HeaderRecorded marks a request that a replica forwards for a user. The forwarding replica has
	// logged it as a request of that user.
	HeaderRecorded = "Keelson-Recorded-By"
	// ReplicaUserPrefix, followed by a replica's name, is the user of the replica's requests to
	// other replicas.
	ReplicaUserPrefix = "keelson:replica:"
	// StatusTimeout is the maximum time for which a replica waits for reports of the other
	// replicas.
	StatusTimeout = time.Second

	maxErrorBytes = 4096
)

// WriteJSON writes v as the JSON body of a response.
func WriteJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // an error means that the client has closed the connection
}

// WriteError writes an error response with a metav1.Status, as API resources do, so that every
// client displays the message.
func WriteError(w http.ResponseWriter, code int, err error) {
	reason := metav1.StatusReasonUnknown
	switch code {
	case http.StatusBadRequest:
		reason = metav1.StatusReasonBadRequest
	case http.StatusNotFound:
		reason = metav1.StatusReasonNotFound
	case http.StatusMethodNotAllowed:
		reason = metav1.StatusReasonMethodNotAllowed
	case http.StatusConflict:
		reason = metav1.StatusReasonConflict
	case http.StatusServiceUnavailable:
		reason = metav1.StatusReasonServiceUnavailable
	case http.StatusInternalServerError:
		reason = metav1.StatusReasonInternalError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: err.Error(),
	})
}

// RefusedError is the error of a rejected request, with the HTTP status code of the response.
type RefusedError struct {
	Code int
	Err  error
}

// Refuse returns a RefusedError with an HTTP status code and a reason.
func Refuse(code int, err error) error { return &RefusedError{code, err} }

// Error returns the reason of the refusal.
func (e *RefusedError) Error() string { return e.Err.Error() }

// Unwrap returns the reason of the refusal.
func (e *RefusedError) Unwrap() error { return e.Err }

// ReadError returns the error in an error response of another replica.
func ReadError(resp *http.Response) error {
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
	var s struct{ Message string }
	if json.Unmarshal(raw, &s) == nil && s.Message != "" {
		return fmt.Errorf("%s: %s", resp.Status, s.Message)
	}
	return errors.New(resp.Status)
}

// ReadJSON decodes the body of a response, which has at most limit bytes, into v, and closes the
// body. If the other replica does not support the path, the error has the text unsupported.
func ReadJSON(resp *http.Response, limit int64, unsupported string, v any) error {
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNotFound:
		return errors.New(unsupported)
	default:
		return errors.New(resp.Status)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, limit)).Decode(v); err != nil {
		return fmt.Errorf("%s: %w", resp.Request.URL.Path, err)
	}
	return nil
}

// Reason returns the text of an error of an HTTP request, without the method and the URL of the
// request. For a timeout, it says that no answer was received within StatusTimeout.
func Reason(err error) string {
	if errors.Is(err, context.DeadlineExceeded) {
		return "no answer within " + StatusTimeout.String()
	}
	var call *url.Error
	if errors.As(err, &call) {
		err = call.Err
	}
	return err.Error()
}
