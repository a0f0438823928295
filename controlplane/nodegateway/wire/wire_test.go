package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/internal/virtual"
)

// An encoded object can be decoded as its own kind only.
func TestObjectRoundTrip(t *testing.T) {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", ResourceVersion: "7"}}
	encoded, err := EncodeObject("v1", "Pod", pod)
	if err != nil {
		t.Fatal(err)
	}
	if encoded.Kind != "Pod" || encoded.Namespace != "default" || encoded.Name != "web" || encoded.Revision != 7 {
		t.Errorf("encoded %s %s/%s at revision %d", encoded.Kind, encoded.Namespace, encoded.Name, encoded.Revision)
	}
	got := &v1.Pod{}
	if err := DecodeObject(encoded.Raw, "Pod", got); err != nil || got.Name != "web" {
		t.Errorf("decoded %q, %v", got.Name, err)
	}
	for name, raw := range map[string][]byte{
		"empty": nil, "without the prefix": encoded.Raw[4:], "cut short": encoded.Raw[:len(encoded.Raw)-1],
	} {
		if err := DecodeObject(raw, "Pod", &v1.Pod{}); err == nil {
			t.Errorf("%s: decoded", name)
		}
	}
	if err := DecodeObject(encoded.Raw, "Node", &v1.Node{}); err == nil {
		t.Error("a Pod was decoded as a Node")
	}
}

// A message may name an object of any valid length, and no longer one.
func TestNameLengths(t *testing.T) {
	if err := CheckNameLengths(strings.Repeat("n", 253), strings.Repeat("p", 253), strings.Repeat("u", 36)); err !=
		nil {
		t.Error(err)
	}
	if CheckNameLengths(strings.Repeat("n", maxNameBytes), "p") == nil {
		t.Error("overlong names are accepted")
	}
}

// Resources of other domains than kubernetes.io are extended resources. Quota names are not.
func TestExtendedResources(t *testing.T) {
	one := resource.MustParse("1")
	got := ExtendedResources(v1.ResourceList{"cpu": one, "example.com/gpu": one, "node.kubernetes.io/x": one,
		"kubernetes.io/x": one, "requests.example.com/gpu": one})
	if _, ok := got["example.com/gpu"]; !ok || len(got) != 1 {
		t.Errorf("extended resources %v", got)
	}
	if ExtendedResources(v1.ResourceList{"cpu": one}) != nil {
		t.Error("a list without extended resources is not nil")
	}
}

// A stream ends without an error if its agent disconnects, and with Internal for errors without a
// gRPC code.
func TestStreamError(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"no error", nil, codes.OK},
		{"end of the stream", io.EOF, codes.OK},
		{"canceled", context.Canceled, codes.OK},
		{"with a code", ErrSlowAgent, codes.ResourceExhausted},
		{"without a code", errors.New("broken"), codes.Internal},
	} {
		if got := status.Code(StreamError(c.err)); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// receiver is a stream with one message, which arrives after a delay.
type receiver struct{ delay time.Duration }

func (r receiver) Recv() (string, error) {
	time.Sleep(r.delay)
	return fmt.Sprint("after ", r.delay), nil
}

// The first message of a stream must arrive within firstMessageTimeout. Wait returns when the
// goroutines of the streams have ended, and Stop may be called again.
func TestLifetime(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		l := NewLifetime("cp1")
		if m, err := ReceiveFirst(l, receiver{time.Second}); err != nil || m != "after 1s" {
			t.Errorf("received %q, %v", m, err)
		}
		if _, err := ReceiveFirst(l, receiver{time.Minute}); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a late message: %v", err)
		}
		select {
		case <-l.Stopping():
			t.Error("stopping before Stop")
		default:
		}
		l.Stop()
		l.Stop()
		<-l.Stopping()
		l.Wait()
		if err := l.StoppingError(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "cp1") {
			t.Error(err)
		}
	})
}
