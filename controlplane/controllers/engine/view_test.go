package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// stage is a view and an informer whose deliveries are made by the test.
type stage struct {
	*View[*corev1.ConfigMap]
	informer cache.SharedIndexInformer
	now      time.Time
}

func newStage() *stage {
	s := &stage{now: time.Unix(1000, 0)}
	s.informer = cache.NewSharedIndexInformer(&cache.ListWatch{}, &corev1.ConfigMap{}, 0, cache.Indexers{
		"color": func(o any) ([]string, error) { return []string{o.(*corev1.ConfigMap).Labels["color"]}, nil },
	})
	t := &Term{Now: func() time.Time { return s.now }, observers: map[cache.SharedIndexInformer][]observer{}}
	s.View = ViewOf[*corev1.ConfigMap](t, s.informer)
	return s
}

func colored(name, color string, revision int) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name),
		Labels: map[string]string{"color": color}, ResourceVersion: fmt.Sprint(revision)}}
}

// cache stores o in the informer without delivering it yet; tell delivers it.
func (s *stage) cache(o *corev1.ConfigMap) { _ = s.informer.GetIndexer().Add(o) }

func (s *stage) tell(t ChangeType, o *corev1.ConfigMap) { s.handleChange(t, o) }

func (s *stage) show(color string) string {
	var out []string
	for _, o := range s.By("color", color) {
		out = append(out, o.Name+"@"+o.ResourceVersion)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// P12: a view returns the controller's writes exactly once, in the newest version.
func TestViewReadsItsWrites(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(s *stage)
		want string
	}{
		{"only the cache", func(s *stage) { s.cache(colored("a", "red", 1)) }, "a@1"},
		{"created, not cached yet", func(s *stage) { s.RecordWrite(colored("a", "red", 5)) }, "a@5"},
		{"created and cached, not told yet", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.cache(colored("a", "red", 5))
		}, "a@5"},
		{"updated, the cache is behind", func(s *stage) {
			s.cache(colored("a", "red", 1))
			s.RecordWrite(colored("a", "red", 5))
		}, "a@5"},
		{"updated, the cache is ahead", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.cache(colored("a", "red", 7))
		}, "a@7"},
		{"moved to another index value", func(s *stage) {
			s.cache(colored("a", "red", 1))
			s.RecordWrite(colored("a", "blue", 5))
		}, ""},
		{"moved here", func(s *stage) {
			s.cache(colored("a", "blue", 1))
			s.RecordWrite(colored("a", "red", 5))
		}, "a@5"},
		{"created, seen and deleted", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.tell(Added, colored("a", "red", 5))
			s.tell(Deleted, colored("a", "red", 5))
		}, ""},
		{"seen and deleted before the answer came", func(s *stage) {
			s.tell(Added, colored("a", "red", 5))
			s.tell(Deleted, colored("a", "red", 6))
			s.RecordWrite(colored("a", "red", 5))
		}, ""},
		{"a later change of another object proves that ours was seen", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.cache(colored("b", "red", 9))
			s.tell(Added, colored("b", "red", 9))
		}, "b@9"},
		{"an earlier change of another object proves nothing", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.cache(colored("b", "red", 3))
			s.tell(Added, colored("b", "red", 3))
		}, "a@5 b@3"},
		{"never seen: believed for a while", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.now = s.now.Add(ownWriteLifetime - time.Second)
			s.takeExpired()
		}, "a@5"},
		{"never seen: not for ever", func(s *stage) {
			s.RecordWrite(colored("a", "red", 5))
			s.now = s.now.Add(ownWriteLifetime + time.Second)
			if len(s.takeExpired()) != 1 {
				panic("the object is not handed back")
			}
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStage()
			c.do(s)
			if got := s.show("red"); got != c.want {
				t.Errorf("red are %q, want %q", got, c.want)
			}
			got, ok := s.Get("ns", "a")
			if wanted := strings.HasPrefix(c.want, "a@"); wanted &&
				(!ok || "a@"+got.ResourceVersion != strings.Fields(c.want)[0]) {
				t.Errorf("Get gives %v", got)
			}
		})
	}
}

func TestViewKnowsWhatIsGoing(t *testing.T) {
	s := newStage()
	a := colored("a", "red", 1)
	s.cache(a)
	if s.IsDeleting(a) {
		t.Error("going without reason")
	}
	s.MarkDeleting(a)
	if !s.IsDeleting(a) {
		t.Error("a deletion that was asked for is not known")
	}
	s.UnmarkDeleting(a)
	if s.IsDeleting(a) {
		t.Error("a deletion that failed is still believed")
	}
	s.MarkDeleting(a)
	marked := colored("a", "red", 2)
	marked.DeletionTimestamp = &metav1.Time{Time: s.now}
	s.tell(Updated, marked)
	if !s.IsDeleting(marked) || len(s.deleting) != 0 {
		t.Error("once the informer says it, the memory is not needed")
	}
	s.MarkDeleting(a)
	s.tell(Deleted, a)
	if len(s.deleting) != 0 {
		t.Error("a deleted object is remembered")
	}
	s.MarkDeleting(a)
	s.now = s.now.Add(ownWriteLifetime + time.Second)
	if got := s.takeExpired(); len(got) != 1 || s.IsDeleting(a) {
		t.Error("a deletion that nobody saw is believed for ever")
	}
}
