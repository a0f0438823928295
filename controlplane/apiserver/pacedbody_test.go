package apiserver_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/apiserver"
)

// deadlines fails the test if a read deadline is set after its handler has returned, because the
// stream may then belong to another request.
type deadlines struct {
	http.ResponseWriter
	t        *testing.T
	set      int
	returned bool
}

func (d *deadlines) SetReadDeadline(time.Time) error {
	if d.set++; d.returned {
		d.t.Error("the stream is touched although its handler has returned")
	}
	return nil
}

// A proxy's request may read the body on when the handler has returned: another server has answered
// before it has taken everything. HTTP/2 has given the stream away then, and whoever touches it
// ends the process.
func TestBodiesAreReadAfterTheHandler(t *testing.T) {
	for name, size := range map[string]int{"in parts": 8, "to its end": 64} {
		d := &deadlines{ResponseWriter: httptest.NewRecorder(), t: t}
		var body io.Reader
		apiserver.DefaultPace.LimitHandler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			body = r.Body
			if _, err := body.Read(make([]byte, 8)); err != nil {
				t.Error(err)
			}
		})).ServeHTTP(d, httptest.NewRequest("POST", "/",
			io.MultiReader(strings.NewReader(strings.Repeat("x", 8)), strings.NewReader("the rest of it"))))
		if d.set == 0 {
			t.Errorf("%s: the pace is not kept", name)
		}
		d.returned = true
		if n, err := io.ReadFull(body, make([]byte, size)); size == 8 && err != nil ||
			size == 64 && n != len("the rest of it") {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
	}
}
