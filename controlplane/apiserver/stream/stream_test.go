package stream

import (
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func FuzzLogRequest(f *testing.F) {
	f.Add("follow=true&tailLines=5&sinceTime=2026-01-02T03:04:05Z")
	f.Add("sinceSeconds=9223372036854775807")
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		lr, err := logRequest(q, time.Now())
		if err != nil && !apierrors.IsInvalid(err) || err == nil && lr.TailLines != nil && *lr.TailLines < 0 {
			t.Errorf("%q: %+v %v", query, lr, err)
		}
	})
}

func FuzzOpenMessage(f *testing.F) {
	f.Add([]byte("\x00abc"), false)
	f.Add([]byte("0YWJj"), true)
	f.Fuzz(func(t *testing.T, msg []byte, base64 bool) {
		m := &mux{base64: base64}
		_, data, err := m.openMessage(msg)
		if err == nil && len(data) >= len(msg) {
			t.Errorf("%q became %q", msg, data)
		}
	})
}

// The container that is meant, and the words when that is not clear.
func TestContainer(t *testing.T) {
	pod := func(init bool, annotation string, names ...string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p",
			Annotations: map[string]string{"kubectl.kubernetes.io/default-container": annotation}}}
		for _, n := range names {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: n})
		}
		if init {
			p.Spec.InitContainers = []corev1.Container{{Name: "i"}}
		}
		return p
	}
	for _, x := range []struct {
		pod        *corev1.Pod
		ask, want  string
		complaints string
	}{
		{pod(false, "", "a"), "", "a", ""},
		{pod(true, "", "a"), "", "a", ""},
		{pod(true, "", "a"), "i", "i", ""},
		{pod(false, "b", "a", "b"), "", "b", ""},
		{pod(false, "", "a", "b"), "", "", "a container name must be specified for pod p, choose one of: [a b]"},
		{pod(true, "", "a", "b"), "", "", "a container name must be specified for pod p, choose one of: [a b] or one " +
			"of the init containers: [i]"},
		{pod(false, "", "a"), "z", "", "container z is not valid for pod p"},
	} {
		got, err := resolveContainer(x.pod, x.ask)
		said := ""
		if err != nil {
			said = err.Error()
		}
		if got != x.want || said != x.complaints {
			t.Errorf("%q, %q; want %q, %q", got, said, x.want, x.complaints)
		}
	}
}

// A log is both outputs of a container; asking for one of them is refused, and so is what is none.
func TestStreamOfALog(t *testing.T) {
	for which, want := range map[string]string{
		"": "", corev1.LogStreamAll: "",
		corev1.LogStreamStderr: "stream: Forbidden: the two outputs of a container are one log",
		"stderr":               `stream: Unsupported value: "stderr"`,
	} {
		_, err := logRequest(url.Values{"stream": {which}}, time.Now())
		if err == nil && want != "" || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v", which, err)
		}
	}
}
