package bundle

import (
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
)

func openFiles(m map[string]string) func(string) (io.ReadCloser, error) {
	return func(name string) (io.ReadCloser, error) {
		if s, ok := m[name]; ok {
			return io.NopCloser(strings.NewReader(s)), nil
		}
		return nil, fs.ErrNotExist
	}
}

func TestResolve(t *testing.T) {
	image := openFiles(map[string]string{
		"etc/passwd": "root:x:0:0::/root:/bin/sh\n# a comment\nbroken\napp:x:1000:1001::/:/bin/sh\n1234:x:55:56::/:\n",
		"etc/group":  "root:x:0:\nappgroup:x:1001:\nextra:x:2000:other,app\n",
	})
	n := func(v int64) *int64 { return &v }
	for _, c := range []struct {
		user User
		open func(string) (io.ReadCloser, error)
		want string
	}{
		{User{}, image, "0 0 [0]"},
		{User{Image: "app"}, image, "1000 1001 [1001 2000]"},
		{User{Image: "app:root"}, image, "1000 0 [0 2000]"},
		{User{Image: "77:88"}, image, "77 88 [88]"},
		{User{Image: "1000"}, image, "1000 1001 [1001 2000]"},
		{User{Image: "1234"}, image, "55 56 [56]"}, // an image user name that looks like a number
		{User{Name: "app", Image: "root"}, image, "1000 1001 [1001 2000]"},
		{User{ID: n(1000), Name: "root"}, image, "1000 1001 [1001 2000]"},
		{User{ID: n(4321), Image: "app:appgroup"}, image, "4321 0 [0]"},
		{User{ID: n(1000), Group: n(5)}, image, "1000 5 [5 2000]"},
		{User{ID: n(1000), Strict: true, Groups: []int64{9, 7, 9}}, image, "1000 1001 [7 9 1001]"},
		{User{ID: n(12)}, openFiles(nil), "12 0 [0]"},
		{User{Name: "app"}, openFiles(nil), `error: user "app" is not in the image's /etc/passwd`},
		{User{Image: "0:ghosts"}, image, `error: group "ghosts" is not in the image's /etc/group`},
		{User{Groups: []int64{-1}}, image, "error: supplemental group -1 is out of range"},
	} {
		a, err := c.user.Resolve(c.open)
		got := fmt.Sprintf("%d %d %v", a.UID, a.GID, a.Groups)
		if err != nil {
			got = "error: " + err.Error()
		}
		if got != c.want {
			t.Errorf("%+v: %s, want %s", c.user, got, c.want)
		}
	}
}
