package blockdevice

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func TestName(t *testing.T) {
	if got := Name(0, 1<<19); got != "0:524288" {
		t.Errorf("a number without a device: %s", got)
	}
	numbers, err := filepath.Glob("/sys/dev/block/*")
	if err != nil || len(numbers) == 0 {
		t.Skip("this machine has no block device")
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(filepath.Base(numbers[0]), "%d:%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	target, err := os.Readlink(numbers[0])
	if err != nil {
		t.Fatal(err)
	}
	if got := Name(major, minor); got != "/dev/"+filepath.Base(target) {
		t.Errorf("%d:%d is %s, want %s", major, minor, got, target)
	}
}
