package retry

import (
	"errors"
	"fmt"
	"testing"
)

func TestOnConflict(t *testing.T) {
	conflict, refused := errors.New("conflict"), errors.New("refused")
	for _, c := range []struct {
		name      string
		tries     int
		conflicts int   // attempts that report a conflict
		then      error // the result of the attempt after them
		want      string
		calls     int
	}{
		{"the first attempt succeeds", 5, 0, nil, "<nil>", 1},
		{"the first attempt is refused", 5, 0, refused, "refused", 1},
		{"success after conflicts", 5, 4, nil, "<nil>", 5},
		{"refusal after a conflict", 5, 1, refused, "refused", 2},
		{"each attempt conflicts", 5, 9, nil, "conflict 5", 5},
		{"one attempt", 1, 9, nil, "conflict 1", 1},
		{"at least one attempt", 0, 9, nil, "conflict 1", 1},
	} {
		calls := 0
		err := OnConflict(c.tries, func() (bool, error) {
			if calls++; calls <= c.conflicts {
				return true, fmt.Errorf("%w %d", conflict, calls)
			}
			return false, c.then
		})
		if fmt.Sprint(err) != c.want || calls != c.calls {
			t.Errorf("%s: %v after %d calls, want %s after %d", c.name, err, calls, c.want, c.calls)
		}
	}
}
