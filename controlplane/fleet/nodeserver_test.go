package fleet

import "testing"

// A node that has much reviewed at once waits, and keeps no other from it; what has left is forgotten.
func TestReviewsAreBoundedPerNode(t *testing.T) {
	var r reviewed
	var leave []func()
	for range maxReviews {
		out, ok := r.enter("w1")
		if !ok {
			t.Fatal("refused too early")
		}
		leave = append(leave, out)
	}
	if _, ok := r.enter("w1"); ok {
		t.Error("one too many")
	}
	other, ok := r.enter("w2")
	if !ok {
		t.Fatal("another node has to wait for it")
	}
	leave[0]()
	again, ok := r.enter("w1")
	if !ok {
		t.Fatal("the place was not given back")
	}
	for _, f := range append(leave[1:], other, again) {
		f()
	}
	if len(r.byNode) != 0 {
		t.Errorf("still held: %v", r.byNode)
	}
}
