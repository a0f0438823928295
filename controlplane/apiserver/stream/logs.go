package stream

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/gorilla/websocket"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/fields"
)

// silence is how long the server waits for the first bytes of a log before it sends the response
// headers.
const silence = 300 * time.Millisecond

// serveLogs streams a container's log as text. It returns an error only if no byte of the log was
// sent.
func (s *Server) serveLogs(w http.ResponseWriter, r *http.Request, pod *corev1.Pod) error {
	lr, err := logRequest(r.URL.Query(), time.Now())
	if err != nil {
		return err
	}
	lr.PodUID, lr.Namespace, lr.Pod = pod.UID, pod.Namespace, pod.Name
	if lr.Container, err = resolveContainer(pod, lr.Container); err != nil {
		return err
	}
	body, err := s.Nodes.Logs(r.Context(), pod.Spec.NodeName, lr)
	if err != nil {
		return s.writeLogError(pod, lr, err)
	}
	defer body.Close()
	out := logSink(&textLog{w: w})
	if websocket.IsWebSocketUpgrade(r) {
		out = &socketLog{w: w, r: r, onDisconnect: func() { body.Close() }}
	}
	defer out.endLog()
	return s.copyLog(out, body, func(err error) error { return s.writeLogError(pod, lr, err) })
}

// writeLogError returns the error for a log that cannot be read. If the container has not started,
// the error contains its waiting reason.
func (s *Server) writeLogError(pod *corev1.Pod, lr api.LogRequest, err error) error {
	if lr.Previous {
		return apierrors.NewBadRequest(fmt.Sprintf("previous terminated container %q in pod %q not found: %v",
			lr.Container, pod.Name, err))
	}
	if why := waitingError(pod, lr.Container); why != nil {
		return why
	}
	return nodeError(err, pod)
}

type chunk struct {
	data []byte
	err  error
}

// copyLog copies body to sink as data arrives. If an error occurs before the first byte, copyLog
// returns the result of refuse for it, which is the error response.
func (s *Server) copyLog(sink logSink, body io.Reader, refuse func(error) error) error {
	chunks := make(chan chunk)
	done := make(chan struct{})
	defer close(done)
	go func() {
		defer close(chunks)
		for {
			buf := make([]byte, 32<<10)
			n, err := body.Read(buf)
			select {
			case chunks <- chunk{buf[:n], err}:
			case <-done:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	begun := false
	quiet := time.NewTimer(silence)
	defer quiet.Stop()
	for {
		select {
		case <-quiet.C:
			begun = true
			if sink.startLog() != nil {
				return nil
			}
		case c, open := <-chunks:
			if !open {
				return nil
			}
			failed := c.err != nil && c.err != io.EOF
			if failed && !begun && len(c.data) == 0 {
				return refuse(c.err)
			}
			if begun = true; sink.startLog() != nil {
				return nil // the client has disconnected
			}
			if failed {
				c.data = fmt.Appendf(c.data, "error reading the log: %v\n", c.err)
			}
			if len(c.data) > 0 && sink.writeLog(c.data) != nil {
				return nil
			}
		}
	}
}

// streamOf validates the stream parameter of a log request, which may be All, Stdout or Stderr.
func streamOf(which string) field.ErrorList {
	switch which {
	case "":
		return nil
	case corev1.LogStreamAll, corev1.LogStreamStdout, corev1.LogStreamStderr:
		o := corev1.PodLogOptions{Stream: &which}
		errs, _ := fields.LoadTable().AnswersFor(o).FindIneffective(o, nil)
		return errs
	}
	return field.ErrorList{field.NotSupported(field.NewPath("stream"), which, []string{corev1.LogStreamAll})}
}

// logRequest decodes PodLogOptions from the query q. sinceSeconds counts back from currentTime.
func logRequest(q url.Values, currentTime time.Time) (api.LogRequest, error) {
	lr := api.LogRequest{Container: q.Get("container")}
	var errs field.ErrorList
	flag := func(name string) bool {
		v := q.Get(name)
		b, err := strconv.ParseBool(v)
		if v != "" && err != nil {
			errs = append(errs, field.Invalid(field.NewPath(name), v, "must be true or false"))
		}
		return b
	}
	number := func(name string, least int64) *int64 {
		v := q.Get(name)
		if v == "" {
			return nil
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < least {
			errs = append(errs, field.Invalid(field.NewPath(name), v,
				fmt.Sprintf("must be greater than or equal to %d", least)))
		}
		return &n
	}
	lr.Follow, lr.Previous, lr.Timestamps = flag("follow"), flag("previous"), flag("timestamps")
	lr.TailLines, lr.LimitBytes = number("tailLines", 0), number("limitBytes", 1)
	since := number("sinceSeconds", 1)
	if since != nil {
		t := metav1.NewTime(currentTime.Add(-time.Duration(min(*since, 1<<31)) * time.Second))
		lr.SinceTime = &t
	}
	if v := q.Get("sinceTime"); v != "" {
		t, err := time.Parse(time.RFC3339, v)
		switch {
		case err != nil:
			errs = append(errs, field.Invalid(field.NewPath("sinceTime"), v, "must be a time in the form of RFC 3339"))
		case since != nil:
			errs = append(errs, field.Forbidden(field.NewPath("sinceTime"),
				"at most one of `sinceTime` or `sinceSeconds` may be specified"))
		}
		at := metav1.NewTime(t)
		lr.SinceTime = &at
	}
	errs = append(errs, streamOf(q.Get("stream"))...)
	if len(errs) > 0 {
		return lr, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("PodLogOptions").GroupKind(), "", errs)
	}
	return lr, nil
}
