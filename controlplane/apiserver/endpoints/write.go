package endpoints

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
)

// gzipThreshold is the size in bytes from which a response is compressed.
const gzipThreshold = 128 << 10

var gzipWriters = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed)
	return w
}}

// writeResponse writes obj in the given format with the given status code. Large lists are written
// item by item.
func (h *Handler) writeResponse(
	ctx context.Context, w http.ResponseWriter, r *http.Request, req *api.Request, format Format, status int,
	obj runtime.Object,
) {
	if l, ok := obj.(*api.ObjectList); ok && status == http.StatusOK && isStreamed(l) {
		h.streamList(w, r, req, format, l)
		return
	}
	if format.As != viewObject && obj != nil {
		v, err := h.newViewer(r, req.Kind, format)
		if err == nil {
			obj, err = v.viewObject(obj)
		}
		if err != nil {
			h.WriteError(w, r, err)
			return
		}
	}
	data, err := h.encodeAs(obj, format)
	if err != nil {
		h.WriteError(w, r, apierrors.NewInternalError(fmt.Errorf("encoding the response: %w", err)))
		return
	}
	writeBytes(w, r, format.Media, status, data)
}

// encodeAs returns an object, or a list of shared objects, encoded in the media type of format. It
// ignores the view in format.As.
func (h *Handler) encodeAs(obj runtime.Object, format Format) ([]byte, error) {
	encoded := func(media string) ([]byte, error) {
		if l, ok := obj.(*api.ObjectList); ok {
			return h.encodeList(l, media)
		}
		return h.cfg.Backend.Encoded(obj, media)
	}
	if format.Media == mediaProto || format.Media == mediaCBOR {
		return encoded(format.Media)
	}
	data, err := encoded(mediaJSON)
	if err != nil {
		return nil, err
	}
	if format.Media == mediaYAML {
		return yaml.JSONToYAML(data)
	}
	if format.Pretty {
		var buf bytes.Buffer
		if err := json.Indent(&buf, data, "", "  "); err != nil {
			return nil, err
		}
		return buf.Bytes(), nil
	}
	return data, nil
}

// AcceptsGzip reports whether the client accepts gzip-compressed responses.
func AcceptsGzip(r *http.Request) bool {
	for _, header := range r.Header.Values("Accept-Encoding") {
		for part := range strings.SplitSeq(header, ",") {
			name, q, _ := strings.Cut(part, ";")
			if strings.TrimSpace(name) != "gzip" {
				continue
			}
			weight, found := strings.CutPrefix(strings.TrimSpace(q), "q=")
			v, err := strconv.ParseFloat(weight, 64)
			return !found || err != nil || v > 0
		}
	}
	return false
}

func writeBytes(w http.ResponseWriter, r *http.Request, media string, status int, data []byte) {
	hd := w.Header()
	hd.Set("Content-Type", media)
	if len(data) >= gzipThreshold && AcceptsGzip(r) {
		hd.Set("Content-Encoding", "gzip")
		hd.Add("Vary", "Accept-Encoding")
		w.WriteHeader(status)
		zip := gzipWriters.Get().(*gzip.Writer)
		defer gzipWriters.Put(zip)
		zip.Reset(w)
		_, _ = zip.Write(data) // fails only if the client is gone
		_ = zip.Close()
		return
	}
	hd.Set("Content-Length", strconv.Itoa(len(data)))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(data)
	}
}

// WriteError writes an error as a Status object in the media type that the client accepts. It also
// calls Config.Refused.
func (h *Handler) WriteError(w http.ResponseWriter, r *http.Request, err error) {
	s := StatusOf(err)
	var ended *TerminationError
	if marker, ok := w.(TerminationMarker); ok && errors.As(err, &ended) {
		marker.MarkTerminated()
	}
	if h.cfg.Refused != nil {
		h.cfg.Refused(r.Context(), s)
	}
	if s.Details != nil && s.Details.RetryAfterSeconds > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(s.Details.RetryAfterSeconds)))
	}
	f, nerr := Negotiate(r)
	if nerr != nil {
		f = Format{Media: mediaJSON}
	}
	data, eerr := h.encodeAs(s, f)
	if eerr != nil {
		http.Error(w, s.Message, int(s.Code))
		return
	}
	writeBytes(w, r, f.Media, int(s.Code), data)
}

// TerminationError is the error of a request that the server ended to protect itself: its limits
// were reached, or the request did not complete within its timeout. It has the status of its cause.
type TerminationError struct{ cause error }

// NewTerminationError returns a TerminationError with the given cause.
func NewTerminationError(cause error) *TerminationError { return &TerminationError{cause} }

func (e *TerminationError) Error() string { return e.cause.Error() }

// Unwrap returns the cause, for errors.As.
func (e *TerminationError) Unwrap() error { return e.cause }

// TerminationMarker is a response writer that records that the server ended the request to protect
// itself.
type TerminationMarker interface{ MarkTerminated() }

// StatusOf converts any error to the Status that the client receives.
func StatusOf(err error) *metav1.Status {
	var se apierrors.APIStatus
	var s metav1.Status
	switch {
	case errors.As(err, &se):
		s = se.Status()
	case errors.Is(err, context.DeadlineExceeded):
		s = apierrors.NewTimeoutError("request did not complete within the allotted timeout", 1).ErrStatus
	case errors.Is(err, context.Canceled):
		s = apierrors.NewTimeoutError("the client canceled the request", 0).ErrStatus
	default:
		s = apierrors.NewInternalError(err).ErrStatus
	}
	if s.Code == 0 {
		s.Code = http.StatusInternalServerError
	}
	if s.Status == "" {
		s.Status = metav1.StatusFailure
	}
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	return &s
}

// unwrapProto decodes data, a body in Kubernetes' protobuf envelope, into target. The type of
// target need not be registered in the scheme.
func unwrapProto(data []byte, target interface{ Unmarshal([]byte) error }) error {
	body, ok := bytes.CutPrefix(data, []byte{'k', '8', 's', 0})
	if !ok {
		return errors.New("the body does not start with the protobuf prefix of Kubernetes")
	}
	var u runtime.Unknown
	if err := u.Unmarshal(body); err != nil {
		return err
	}
	return target.Unmarshal(u.Raw)
}
