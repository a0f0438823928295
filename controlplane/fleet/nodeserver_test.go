package fleet

import "testing"

// A node that has much reviewed at once waits, and keeps no other from it; what has left is forgotten.
func TestReviewsAreBoundedPerNode(t *testing.T) {
	var r places[string]
	var leave []func()
	for range maxReviews {
		out, ok := r.enter("w1", maxReviews)
		if !ok {
			t.Fatal("refused too early")
		}
		leave = append(leave, out)
	}
	if _, ok := r.enter("w1", maxReviews); ok {
		t.Error("one too many")
	}
	other, ok := r.enter("w2", maxReviews)
	if !ok {
		t.Fatal("another node has to wait for it")
	}
	leave[0]()
	again, ok := r.enter("w1", maxReviews)
	if !ok {
		t.Fatal("the place was not given back")
	}
	for _, f := range append(leave[1:], other, again) {
		f()
	}
	if len(r.count) != 0 {
		t.Errorf("still held: %v", r.count)
	}
}
