// Package blockdevice names block devices by their numbers.
package blockdevice

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Name returns the path of the device file of a block device, for example "/dev/sda1". If the
// kernel has no block device with this number, it returns the number, for example "0:38". File
// systems without a block device have such numbers.
func Name(major, minor uint32) string {
	number := fmt.Sprintf("%d:%d", major, minor)
	target, err := os.Readlink("/sys/dev/block/" + number)
	if err != nil {
		return number
	}
	// sysfs has "!" for "/": "cciss!c0d0" is /dev/cciss/c0d0.
	return "/dev/" + strings.ReplaceAll(filepath.Base(target), "!", "/")
}
