//go:build !race

package virtual

const raceDetectorEnabled = false
