package apiservertest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/audit"
)

// Journal is an audit.Sink that stores the audit events in memory.
type Journal struct {
	Mu   sync.Mutex
	Text bytes.Buffer
}

// Put stores an audit event. It implements audit.Sink.
func (j *Journal) Put(line []byte) error {
	j.Mu.Lock()
	defer j.Mu.Unlock()
	j.Text.Write(line)
	return nil
}

// All returns the stored audit events for which match returns true.
func (j *Journal) All(t *testing.T, match func(*audit.Event) bool) (out []audit.Event) {
	t.Helper()
	j.Mu.Lock()
	defer j.Mu.Unlock()
	for line := range bytes.Lines(j.Text.Bytes()) {
		var e audit.Event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if match(&e) {
			out = append(out, e)
		}
	}
	return out
}

// Audited starts a replica with the audit policy in text, and returns the journal of its audit
// events. An empty text is the default policy.
func Audited(t *testing.T, text string) (*Replica, *Journal) {
	path := ""
	if text != "" {
		path = filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(path, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p, err := audit.LoadPolicy(path)
	if err != nil {
		t.Fatal(err)
	}
	j := &Journal{}
	return StartReplica(t, func(c *apiserver.Config) { c.Process.Audit = audit.New(p, j, time.Now) }), j
}

// One waits until exactly one stored event matches, and returns it. Waiting is necessary because a
// response arrives before its audit event is stored.
func (j *Journal) One(t *testing.T, what string, match func(*audit.Event) bool) (out audit.Event) {
	t.Helper()
	Eventually(t, func() error {
		got := j.All(t, match)
		if len(got) == 1 {
			out = got[0]
			return nil
		}
		return fmt.Errorf("%s: %d records", what, len(got))
	})
	return out
}

// WarningRecorder is a rest.WarningHandler that collects the warnings that a client receives.
type WarningRecorder struct{ Texts []string }

// HandleWarningHeader stores the warning. It implements rest.WarningHandler.
func (h *WarningRecorder) HandleWarningHeader(_ int, _ string, text string) {
	h.Texts = append(h.Texts, text)
}

// Take returns the collected warnings as lines and removes them.
func (h *WarningRecorder) Take() string {
	out := strings.Join(h.Texts, "\n")
	h.Texts = nil
	return out
}

// Labelled creates a namespace with Pod Security labels. labels are pairs of key suffix and value,
// such as "enforce", "restricted".
func Labelled(r *Replica, name string, labels ...string) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	for i := 0; i+1 < len(labels); i += 2 {
		ns.Labels["pod-security.kubernetes.io/"+labels[i]] = labels[i+1]
	}
	r.Must(ns)
	r.DefaultAccount(name)
}

// PodIn returns a new pod object in a namespace. change may modify the pod; it may be nil.
func PodIn(namespace, name string, change func(*corev1.Pod)) *corev1.Pod {
	p := NewPod(name)
	p.Namespace = namespace
	if change != nil {
		change(p)
	}
	return p
}

// Privileged makes the first container of a pod privileged.
func Privileged(p *corev1.Pod) {
	yes := true
	p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
}
